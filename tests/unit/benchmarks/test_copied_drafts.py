"""What counts as copied from a prompt, and which answers loop."""

from __future__ import annotations

import pytest
from copied_drafts import copied_share, loops

PROMPT = [*range(100, 130)]
SPAN = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (PROMPT[3:11], 1.0),
        (PROMPT[3:10], 0.0),
        ([*PROMPT[:9], *PROMPT[20:28]], 1.0),
        ([7, *PROMPT[5:15], 7, 7, *PROMPT[:7]], 0.5),
        ([*PROMPT[:8], *PROMPT[7::-1]], 0.5),
        ([], 0.0),
    ],
    ids=["a run of 8", "a run of 7", "two runs", "beside others", "backwards", "nothing"],
)
def test_copied_is_what_stands_in_the_prompt_in_runs_of_eight(
    answer: list[int], share: float
) -> None:
    assert copied_share(PROMPT, answer) == share


def test_a_prompt_that_is_shorter_than_a_run_is_not_copied() -> None:
    assert copied_share(PROMPT[:7], PROMPT[:7]) == 0


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        (SPAN * 3, True),
        ((SPAN * 3)[:-1], False),
        ([*SPAN, *SPAN, 9, *SPAN], False),
        ([*PROMPT, *SPAN * 3, *PROMPT], True),
        ([7] * 16, True),
        ([7] * 15, False),
        ([7, 8] * 8, True),
        (PROMPT * 2, False),
        (PROMPT * 3, True),
        ([], False),
    ],
    ids=["three times", "not quite", "not in a row", "in the middle", "one token", "too short",
         "of two", "a long span twice", "a long span", "nothing"],
)  # fmt: skip
def test_an_answer_loops_where_a_span_comes_three_times_in_a_row(
    tokens: list[int], is_loop: bool
) -> None:
    assert loops(tokens) == is_loop
