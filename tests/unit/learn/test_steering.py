"""What a check changes about the steps after it: the base's share, and how often kinds come."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.scripted_training import Scripted

from headstart.learn.certainty import Gain, Walked
from headstart.learn.checking import Verdict
from headstart.learn.loop import Base, LearningLoop
from headstart.learn.mixing import Mix
from headstart.learn.steering import MOST_BASE, Steering, weights
from headstart.learn.store import Store, TextWriter
from headstart.learn.texts import Text

_SAME = Gain(2.0, 2.0, 0.0, 0.0, 100)


def checked(learned_base: float, **ratios: float) -> Verdict:
    return Verdict(_SAME, _SAME, {}, learned_base=learned_base, ratios=ratios)


def records(kind: str, count: int) -> list[Any]:
    return [
        Text(id=f"{kind}{i}", prompt=[1], answer=[2] * 10, kind=kind, time=0.0,
             finish_reason="stop").record() for i in range(count)
    ]  # fmt: skip


def test_the_base_gets_more_and_steps_are_slower_before_too_much_is_lost() -> None:
    steering = Steering(0.4)
    shares, rates = [], []
    for loss in (0.0, 0.002, 0.003, 0.006, 0.02, 0.02, 0.002, 0.001, 0.0):
        steering.checked(checked(-loss))
        shares.append(steering.base_share)
        rates.append(steering.rate_share)
    assert shares == pytest.approx([0.4, 0.4, 0.45, 0.55, MOST_BASE, MOST_BASE, 0.6, 0.55, 0.5])
    expected = [1.0, 1.0, 0.7, 0.35, 0.25, 0.25, 0.25, 0.25 / 0.7, 0.25 / 0.49]
    assert rates == pytest.approx(expected)


def test_without_a_base_there_is_no_share_of_it() -> None:
    steering = Steering(0.0)
    steering.checked(checked(-0.02))
    assert steering.base_share == 0.0


def test_kinds_that_have_gained_less_come_oftener_within_bounds() -> None:
    found = weights({"summary": 1.10, "translation": 1.25, "question": 1.15, "other": 0.98})
    assert found["other"] > found["summary"] > found["question"] > found["translation"]
    assert weights({"a": 1.0, "b": 2.0}) == pytest.approx({"a": 2.0, "b": 0.55 / 1.05})
    assert weights({"a": 1.2, "b": 1.2}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert weights({}) == {}


def test_gains_of_heads_that_served_add_up_and_those_of_others_are_forgotten() -> None:
    steering = Steering(0.4)
    steering.checked(checked(0.0, a=1.10, b=1.20))
    steering.served(is_learned=True)
    steering.checked(checked(0.0, a=1.00, b=1.00))
    after_one = steering.weights
    assert after_one == pytest.approx(weights({"a": 1.10, "b": 1.20}))
    steering.checked(checked(0.0, a=1.10, b=1.00))  # the head before was not served
    assert steering.weights == pytest.approx(weights({"a": 1.21, "b": 1.20}))
    steering.served(is_learned=False)
    steering.checked(checked(0.0, a=1.00, b=1.00))
    assert steering.weights == pytest.approx({"a": 1.0, "b": 1.0})


def test_a_mix_deals_kinds_by_their_numbers_and_weights() -> None:
    mix = Mix((), 0.0)
    mix.replace([*records("a", 40), *records("b", 40)])
    even = Counter(r.category for _ in range(200) for r in mix.step(100))
    mix.weights = {"a": 2.0, "b": 0.5}
    heavy = Counter(r.category for _ in range(200) for r in mix.step(100))
    # Half of all draws are from the newer half, which is all b: its weight does not matter there.
    assert even["a"] / sum(even.values()) == pytest.approx(0.25, abs=0.05)
    assert heavy["a"] / sum(heavy.values()) == pytest.approx(0.4, abs=0.05)


class Forgetting(Scripted):
    """Every step gains on recent answers and loses as much of what was known."""

    def walk(self, records: Any, share: float) -> dict[str, Walked]:
        more = int(3 * self.num_steps * share)
        return {
            r.id: Walked(r.category, 100, 400 - more if r.id.startswith("base") else 150 + more)
            for r in records
        }


def test_a_loop_protects_what_was_known_as_its_checks_say(tmp_path: Path) -> None:
    with TextWriter(tmp_path) as writer:
        writer.add(
            Text(id=f"t{i}", prompt=[i, 2], answer=[3] * 9, kind="ab"[i % 2], time=float(i),
                 finish_reason="stop") for i in range(200)
        )  # fmt: skip
    told: list[tuple[str, Any]] = []
    ticks = iter(range(10**6))
    base = Base(records("base", 80), records("base", 80))
    loop = LearningLoop(
        Store(tmp_path, 1 << 20), Forgetting(), base, lambda: tmp_path / "0001",
        lambda name, facts: told.append((name, facts)), batch_tokens=20, least_seconds=3,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    while "checked" not in dict(told):
        loop.turn()
    found = dict(told)["checked"]
    assert found["learned_base"] < -0.01 and found["share"] < 1
    assert found["base_share"] == pytest.approx(0.5) == loop._mix.base_share
    assert found["rate_share"] == pytest.approx(0.5)
    loop.served(tmp_path / "0001")
    loop.turn()
    assert dict(told)["step"]["rate"] == pytest.approx(0.5)
    assert set(found["weights"]) == {"a", "b"} and loop._mix.weights == found["weights"]
    assert "with 90 % certainty" in found["reason"]


class Forgetful(Scripted):
    """Every step gains on newer answers and loses as much of older ones."""

    def walk(self, records: Any, share: float) -> dict[str, Walked]:
        more = int(9 * self._level * share)
        return {
            r.id: Walked(r.category, 100, 400 - more if int(r.id[1:]) < 400 else 150 + more)
            for r in records
        }


def test_without_a_base_a_head_that_forgets_is_given_up(tmp_path: Path) -> None:
    """Regression: a share of nothing could always be raised, so that no check counted as failed."""
    with TextWriter(tmp_path) as writer:
        writer.add(
            Text(id=f"t{i}", prompt=[i, 2], answer=[3] * 9, kind="a", time=float(i),
                 finish_reason="stop") for i in range(800)
        )  # fmt: skip
    told: list[tuple[str, Any]] = []
    ticks = iter(range(10**6))
    training = Forgetful(gain=1.0)
    loop = LearningLoop(
        Store(tmp_path, 1 << 20), training, Base(), lambda: tmp_path / "0001",
        lambda name, facts: told.append((name, facts)), batch_tokens=20, least_seconds=3,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    while loop.turn():
        assert training.num_steps < 500
    assert told[-1][0] == "rests"
    verdicts = [facts for name, facts in told if name == "checked"]
    assert all(found["recent"]["low"] > 0 and not found["is_accepted"] for found in verdicts)


def test_what_checks_changed_ends_with_another_head_and_new_texts() -> None:
    steering = Steering(0.4)
    steering.checked(checked(-0.02))
    assert steering.can_protect and steering.rate_share < 1
    for _ in range(4):
        steering.checked(checked(-0.02))
    assert not steering.can_protect
    steering.served(is_learned=True)
    assert steering.base_share == MOST_BASE
    steering.served(is_learned=False)
    assert (steering.base_share, steering.rate_share) == (0.4, 1.0)


def test_few_answers_of_the_base_steer_nothing() -> None:
    steering, few = Steering(0.4), Gain(2.0, 1.9, -0.05, -0.05, 20)
    steering.checked(Verdict(_SAME, few, {}, learned_base=-0.05))
    assert (steering.base_share, steering.rate_share) == (0.4, 1.0)
