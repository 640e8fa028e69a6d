"""What the first head walked stays what later heads are held against, over restarts, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.learn.certainty import Walked
from headstart.learn.checking import Checker
from headstart.learn.known import KnownWalks
from headstart.learn.texts import Text


def records(count: int) -> list[Any]:
    return [
        Text(id=f"b{i}", prompt=[i], answer=[2] * 10, kind="a", time=0.0,
             finish_reason="stop").record() for i in range(count)
    ]  # fmt: skip


def walks(tokens: int) -> dict[str, Walked]:
    return {f"b{i}": Walked("a", 100, tokens) for i in range(70)}


def test_losses_of_heads_after_restarts_do_not_add_up(tmp_path: Path) -> None:
    """Each head loses 0.8 %; the second one is served by a learner that never saw the first."""
    path, base = tmp_path / "known.json", records(70)

    def check(serving: int, learned: int) -> Any:
        walk = lambda _, share: walks(learned if share else serving)  # noqa: E731
        return Checker(KnownWalks(path)).check(base, base, walk).base

    assert not check(1000, 992).is_worse_by(0.01)
    again = check(992, 984)
    assert again.old == 10.0 and again.is_worse_by(0.01)
    path.unlink()
    assert not check(992, 984).is_worse_by(0.01), "the control: nothing is known"


def test_answers_that_left_the_base_are_forgotten_and_new_ones_begin_with_the_serving_head(
    tmp_path: Path,
) -> None:
    path = tmp_path / "known.json"
    KnownWalks(path).of(records(3), walks(1000))
    found = KnownWalks(path).of(records(5)[1:], walks(900))
    assert [found[f"b{i}"].tokens for i in range(1, 5)] == [1000, 1000, 900, 900]
    assert len(json.loads(path.read_text())) == 4


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', '{"a": {"kind": "x", "rounds": "many"}}'])
def test_a_file_that_is_none_is_made_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known.json"
    path.write_text(text)
    assert KnownWalks(path).of(records(1), walks(7))["b0"].tokens == 7
    assert KnownWalks(path).of(records(1), walks(9))["b0"].tokens == 7


def test_walks_of_answers_that_are_compared_no_more_are_forgotten() -> None:
    """Regression: a learner kept one for every held-out answer until another head served."""
    checker, base, walked = Checker(), records(2), list[str]()

    def walk(own: Any, share: float) -> dict[str, Walked]:
        walked.extend(record.id for record in own if share == 0)
        return {record.id: Walked("", 10, 20) for record in own}

    answers = records(40)
    for start in range(2, 30):
        checker.check(answers[start : start + 10], base, walk)
    assert len(checker._serving) == 12 and len(walked) == len(set(walked)) == 39
