"""What is dropped, for which reason, and what is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.distill_answers import made

from headstart.distill.filters import fault, is_looping, judge
from headstart.distill.finish import make_report
from headstart.distill.options import DistillOptions

OPTIONS = DistillOptions(heldout=0.3)


def some_ids(count: int = 60, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(10, 5000), count)


@pytest.mark.parametrize(
    ("ids", "fields", "reason"),
    [
        (some_ids(), {}, None),
        ([7, 8, 2], {}, None),
        ([], {"text": ""}, "empty"),
        ([7, 8, 2], {"text": " \n"}, "empty"),
        ([2], {}, "short"),
        (some_ids(), {"finish_reason": "length"}, "truncated"),
        (some_ids(), {"finish_reason": "content_filter"}, "truncated"),
        ([5] * 40, {}, "looping"),
        ([*some_ids(), *[7, 8, 9] * 12], {"finish_reason": "length"}, "looping"),
        ([*some_ids(), *[7, 8, 9] * 12, 2], {}, "looping"),
        ([*some_ids(20) * 5, *some_ids(40, 1)], {}, "looping"),
        ([*some_ids(20) * 2, *some_ids(60, 1)], {}, None),
        ([5] * 8, {}, None),
    ],
    ids=["good", "brief", "nothing", "white space", "one token", "cut off", "filtered",
         "one token for ever", "looping end", "loop that ended", "repeated middle",
         "a quotation", "a few of one token"],
)  # fmt: skip
def test_each_fault_has_its_name(
    ids: list[int], fields: dict[str, str], reason: str | None
) -> None:
    assert fault(made("q", ids, **fields), OPTIONS) == reason


def test_truncated_answers_can_be_kept() -> None:
    cut = made("q", some_ids(), finish_reason="length")
    assert fault(cut, DistillOptions(keep_truncated=True)) is None


@pytest.mark.parametrize("length", [0, 1, 2, 5, 31])
def test_short_texts_never_loop(length: int) -> None:
    assert not is_looping(np.full(length, 3), 0.5)


def test_loops_are_kept_where_everything_may_repeat_itself() -> None:
    """Regression: an end that loops was dropped all the same, so such answers were never scored."""
    assert is_looping(np.full(40, 3), 0.99)
    assert not is_looping(np.full(40, 3), 1.0)


def reasons(answers: Sequence[object], options: DistillOptions = OPTIONS) -> dict[str, str | None]:
    return {v.answer.id: v.reason for v in judge(answers, options)}


def test_turns_after_a_dropped_one_are_dropped_too() -> None:
    """Their prompt holds the faulty answer."""
    answers = [
        made("q", [5] * 40),
        made("q", some_ids(seed=1), turn=1),
        made("q", some_ids(seed=2), sample=1),
    ]
    assert reasons(answers) == {
        "q/t0/s0": "looping", "q/t1/s0": "after a dropped turn", "q/t0/s1": None,
    }  # fmt: skip


def test_turns_after_a_duplicate_stay() -> None:
    first = some_ids(seed=1)
    answers = [
        made("q", first),
        made("q", first, sample=1),
        made("q", some_ids(), sample=1, turn=1),
    ]
    assert reasons(answers)["q/t0/s1"] == "near-duplicate"
    assert reasons(answers)["q/t1/s1"] is None


def test_of_a_pair_across_the_splits_the_training_side_goes() -> None:
    names = [f"q{i}" for i in range(30)]
    ids = some_ids(120)
    verdicts = judge([made(name, ids, user="the same question") for name in names], OPTIONS)
    kept = [v for v in verdicts if v.reason is None]
    assert [v.is_heldout for v in kept] == [True]
    across = [v for v in verdicts if v.reason == "near-duplicate of a held-out answer"]
    assert len(across) == sum(not v.is_heldout for v in verdicts) > 0


def test_the_verdicts_do_not_depend_on_when_answers_came() -> None:
    answers = [made(f"q{i}", some_ids(seed=i // 2), user="x") for i in range(12)]
    shuffled = random.Random(0).sample(answers, 12)
    assert reasons(answers) == reasons(shuffled)
    assert [v.answer for v in judge(answers, OPTIONS)] == [
        v.answer for v in judge(shuffled, OPTIONS)
    ]


def test_the_report_counts_by_reason_and_category() -> None:
    answers = [made(f"q{i}", [5] * 40, category="math") for i in range(7)]
    answers += [made("r", some_ids(), category="code", exact_ids=False)]
    report = make_report(judge(answers, OPTIONS), {"z": "too long"})
    assert report["answers"] == 8
    assert report["kept"] == report["not_exact"] == 1
    assert report["dropped"]["looping"]["count"] == 7
    assert report["dropped"]["looping"]["by_category"] == {"math": 7}
    assert report["dropped"]["looping"]["examples"] == [f"q{i}/t0/s0" for i in range(5)]
    assert report["by_category"]["code"] == {"answers": 1, "kept": 1}
    assert report["refused"] == {"count": 1, "examples": {"z": "too long"}}
