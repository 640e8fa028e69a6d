"""What counts as copied from a prompt, which answers loop, and predictions beside measurements."""

from __future__ import annotations

from statistics import stdev
from typing import Any

import pytest
from copied_drafts import copied_share, loops
from copied_figures import compared

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


def measured(name: str, plain: float, auto: float) -> dict[str, Any]:
    return {
        "id": name, "category": name, "tokens": 100, "loops": name == "loop", "copied_share": 0.0,
        "identical": True, "seconds": {"plain": plain + 1, "auto": auto + 1},
        "prompt_seconds": {"plain": 1.0, "auto": 1.0},
    }  # fmt: skip


def test_prompts_are_held_against_predictions_right_before_and_after_them() -> None:
    """A machine that computes faster for a while makes drafts bring more, in both."""
    times = [("code", 4.0, 2.0), ("loop", 6.0, 3.0), ("code", 4.0, 1.0), ("loop", 6.0, 2.0)]
    rows = [*(measured(*each) for each in times), measured("code", 1.0, 1.0)]  # not a whole slice
    said = [
        {"all": {"auto": value}, "code": {"auto": value}, "looping": {"auto": 9.0}, "table": {}}
        for value in (1.8, 2.2, 5.8)
    ]
    overall, code, loop = compared(said, rows, 2)
    assert (overall["part"], code["part"], loop["part"]) == ("all", "code", "looping")
    assert code["predicted"] == pytest.approx(8 / 3) == code["measured"]
    assert code["off"] == pytest.approx(0) == code["error"]
    assert overall["measured"] == pytest.approx(20 / 8)
    assert overall["predicted"] == pytest.approx(20 / (10 / 2 + 10 / 4))
    assert overall["error"] == pytest.approx(stdev([3 / 2.5, 1]) / 2**0.5)
    assert loop["off"] == pytest.approx((5 / 12) * 9 - 1)
    assert compared(said[:2], rows, 2)[0]["error"] is None and compared(said[:1], rows, 2) == []
