"""How `auto` is compared: what is played again, and what counts."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import pytest
from auto_engines import AUTO, NO_HEAD, Played
from gpu_auto import Contest, expected_seconds

SETTINGS = {"repeats": 1, "seconds": 2.0, "prompt": 4, "answer": 10, "fixed": [0, 1]}


class EnginePair:
    """Seconds of every play, by contender; the last one goes on for ever."""

    def __init__(self, seconds: dict[str, list[float]]):
        self._seconds, self.plays = seconds, Counter[str]()

    def answer(self, name: str, count: int, *, seed: int, **sizes: Any) -> Played:
        took = self._seconds[name]
        own = took[min(self.plays[name], len(took) - 1)]
        self.plays[name] += seed != 999  # a warm-up
        return Played(own, {}, None, [], 0.0, 0.0)


@pytest.mark.parametrize(
    ("auto", "plays", "ratio"),
    [([1.0], 1, 1.0), ([1.1, 0.8], 2, 2 / 1.9), ([1.1, 1.0, 0.9], 3, 1.0), ([1.2], 5, 1 / 1.2)],
    ids=["reached", "missed by chance", "missed twice", "missed"],
)
def test_a_goal_that_is_missed_is_played_for_again(
    auto: list[float], plays: int, ratio: float
) -> None:
    pair = EnginePair({AUTO: auto, NO_HEAD: [2.0], "0": [2.0], "1": [1.0]})
    row = Contest(pair, Namespace(**SETTINGS), 1, {}).run()
    assert row["auto_to_best"] == pytest.approx(ratio)
    assert (pair.plays[AUTO], pair.plays["1"], pair.plays["0"]) == (plays, plays, 1)
    assert len(row["plays"]) == sum(pair.plays.values())


def test_a_part_is_expected_to_take_less() -> None:
    whole = Namespace(prompt=512, answer=256, rates=[0.2, 0.5, 0.8], counts=[1, 4, 16, 80, 256])
    part = Namespace(prompt=512, answer=256, rates=[0.8], counts=[80, 256])
    assert 300 < expected_seconds(whole) < 400 and 100 < expected_seconds(part) < 150
