"""Whether a head is better: certain where it is, silent where it cannot be told."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from headstart.learn.certainty import Walked, compare, length
from headstart.learn.checking import Checker
from headstart.learn.live import ENOUGH, LiveWatch


def walks(rate: float, number: int, seed: int = 0, kind: str = "a") -> list[Walked]:
    rng, result = random.Random(seed), []
    for _ in range(number):
        rounds = rng.randint(20, 60)
        firsts = sum(rng.random() < rate for _ in range(rounds))
        result.append(Walked(kind, rounds, rounds + firsts, rounds, firsts))
    return result


def test_a_clear_gain_is_certain_and_noise_is_not() -> None:
    old, better, same = walks(0.4, 60), walks(0.6, 60, 1), walks(0.4, 60, 2)
    assert compare(old, better).is_better
    assert not compare(old, same).is_better
    assert not compare(old[:4], better[:4]).is_better, "too few answers"
    assert compare(better, old).is_worse_by(0.01)
    assert length(old) < length(better)


def test_nothing_to_compare_is_no_gain() -> None:
    gain = compare([], [])
    assert not gain.is_better and not gain.is_worse_by(0.01)


class _Record:
    def __init__(self, name: str, category: str):
        self.id, self.category = name, category
        self.ids = np.frombuffer(name.encode(), np.uint8)


def verdict(recent: float, base: float) -> object:
    records = [_Record(f"r{i}", "recent") for i in range(40)]
    known = [_Record(f"b{i}", "base") for i in range(40)]

    def walk(rates: tuple[float, float], seed: int):
        found = dict(zip([r.id for r in records], walks(rates[0], 40, seed), strict=True))
        return found | dict(zip([r.id for r in known], walks(rates[1], 40, seed), strict=True))

    return Checker().check(
        records, known,
        lambda own, share: walk((recent, base) if share else (0.4, 0.6), 0),
    )  # fmt: skip


def test_a_head_must_be_better_and_must_not_forget() -> None:
    assert verdict(0.6, 0.6).is_accepted
    forgot = verdict(0.6, 0.5)
    assert not forgot.is_accepted and "worse on what was known" in forgot.reason
    same = verdict(0.4, 0.6)
    assert not same.is_accepted and "not certainly better" in same.reason


def test_the_head_nearest_to_the_learned_one_that_keeps_what_was_known_is_judged() -> None:
    records = {part: [_Record(f"{part}{i}", "a") for i in range(12)] for part in "rb"}
    asked = list[tuple[str, float]]()

    def walk(own: Any, share: float) -> dict[str, Walked]:
        """The whole way gains 40 % and loses 1.75 %; half of it loses less than 1 %."""
        asked.extend((r.id, share) for r in own)
        tokens = {"r": 200 + int(80 * share), "b": 400 - int(7 * share)}
        return {r.id: Walked("a", 100, tokens[r.id[0]]) for r in own}

    verdict = Checker().check(records["r"], records["b"], walk)
    assert verdict.is_accepted and verdict.share == 0.5
    assert "50% of the way" in verdict.reason and verdict.recent.value == pytest.approx(0.2)
    assert {share for name, share in asked if name[0] == "r"} == {0.0, 0.5}, "walked for nothing"


def watched(before: float, after: float, promise: float) -> str | None:
    live = LiveWatch()
    for walked in [*walks(before, 60, 1), *walks(0.9, 60, 2, "easy")]:
        live.observe(walked)
    live.swapped(promise)
    for walked in walks(after, 60, 3):  # the easy kind is not asked any more
        live.observe(walked)
    return live.judge()[1]


def test_a_head_that_holds_its_promise_stays_whatever_is_asked() -> None:
    assert watched(0.4, 0.5, 0.25) is None


def test_a_head_that_falls_short_is_taken_back() -> None:
    reason = watched(0.4, 0.3, 0.25)
    assert reason is not None and "promised" in reason


def test_many_small_kinds_are_judged_as_one() -> None:
    live = LiveWatch()
    for rate, seed in ((0.4, 1), (0.3, 3)):
        for number, walked in enumerate(walks(rate, 60, seed)):
            live.observe(replace(walked, kind=f"{seed} {number // 5}"))
        if seed == 1:
            live.swapped(0.25)
    gain, reason = live.judge()
    assert gain.answers == 60 and reason is not None


def test_few_answers_decide_nothing() -> None:
    live = LiveWatch()
    live.swapped(0.5)
    for walked in walks(0.1, ENOUGH - 1):
        live.observe(walked)
    assert live.judge()[1] is None


def test_losses_on_what_was_known_do_not_add_up_over_heads() -> None:
    records = {part: [_Record(f"{part}{i}", "a") for i in range(12)] for part in "rb"}
    checker, tokens = Checker(), {"r": 200, "b": 400}
    for number in range(1, 4):
        before, tokens = (
            tokens,
            {"r": tokens["r"] + 20, "b": tokens["b"] - 3},
        )  # less than a percent

        def walk(own: Any, share: float, learned: dict[str, int], known: Any) -> dict[str, Walked]:
            found = learned if share else known
            return {r.id: Walked("a", 100, found[r.id[0]]) for r in own}

        own = partial(walk, learned=tokens, known=before)
        verdict = checker.check(records["r"], records["b"], own)
        assert verdict.recent.is_better and verdict.base.old == 4.0
        assert verdict.is_accepted == (number < 2), verdict.reason
        checker.swapped(is_learned=True)
