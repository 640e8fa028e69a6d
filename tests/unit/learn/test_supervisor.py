"""Swaps and rollbacks of a server's learning, without the learner's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.learn import live_notes
from headstart.learn.certainty import Walked
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.live import ENOUGH
from headstart.learn.options import LearnOptions
from headstart.learn.status import lines
from headstart.learn.supervisor import Learning


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[Learning]:
    """With an engine that takes every head."""
    folder = Folder(tmp_path / "learn")
    folder.make(1.0)
    (folder.heads / START).mkdir()
    own = Learning(
        LearnOptions(learn=folder.path), lambda path: pytest.fail("no learner is started")
    )
    child: Any = SimpleNamespace(tell=lambda name, **facts: None, close=lambda: None)
    own._child, own._swap = child, lambda path: None
    yield own
    own.close()


def answer(own: Learning, rate: float, number: int = ENOUGH) -> None:
    for place in range(number):
        firsts = int(10 * rate) + (place % 2)  # not all alike
        own._live.observe(Walked("a", 10, 10 + firsts, tried=10, firsts=firsts))


def offer(own: Learning, first_gain: float = 0.2) -> str:
    name = own.heads.next_name()
    own.heads.path(name).mkdir()
    promise = {"first_gain": first_gain, "reason": "better"}
    own._heard("offer", {"name": name, "promise": promise})
    own._look()
    assert own.serving_name == name
    return name


def live_of(own: Learning, name: str) -> dict[str, Any]:
    """As it is on disk."""
    heads = LearnedHeads(own.folder).heads
    return next(head.live for head in heads if head.name == name)


def test_what_a_head_held_is_written_before_another_takes_its_place(learning: Learning) -> None:
    """Regression: `live` of every head in heads.json was empty."""
    answer(learning, 0.4)
    first = offer(learning)
    answer(learning, 0.6)
    learning._look()
    assert live_of(learning, first) == {}, "not at every look"
    second = offer(learning)
    found = live_of(learning, first)
    assert found["new"] > 1.3 * found["old"] > 0 and found["answers"] == ENOUGH
    assert live_of(learning, second) == {}
    answer(learning, 0.7)
    learning.close()
    assert live_of(learning, second)["new"] > found["new"] and live_of(learning, first) == found
    said = "\n".join(lines(learning.folder))
    shown = f"{found['old']:.3f} -> {found['new']:.3f} ({ENOUGH} answers)"
    assert f"{first} " in said and f"live first drafts {shown}" in said


def test_what_a_head_held_is_written_before_it_is_taken_back(learning: Learning) -> None:
    answer(learning, 0.5)
    first = offer(learning)
    answer(learning, 0.6)
    second = offer(learning)
    kept = live_of(learning, first)
    answer(learning, 0.2)
    learning._look()
    assert learning.serving_name == first and learning.numbers["rollbacks"] == 1
    found = live_of(learning, second)
    assert found["new"] < 0.5 * found["old"]
    answer(learning, 0.6)
    learning.close()
    assert live_of(learning, first) == kept, "it has no gain over the one that was taken back"


def test_a_kill_loses_a_minute_of_it(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(learning, 0.4)
    name = offer(learning)
    answer(learning, 0.6)
    monkeypatch.setattr(live_notes, "_WRITE_SECONDS", 0.0)
    learning._look()
    assert live_of(learning, name)["answers"] == ENOUGH


@pytest.mark.parametrize("shares_device", [True, False])
def test_what_the_learner_will_take_is_known_where_it_is_taken(
    shares_device: bool, learning: Learning
) -> None:
    child: Any = learning._child
    child.is_ready = SimpleNamespace(wait=lambda seconds: True)
    learning._shares_device = shares_device
    learning._heard("ready", {"bytes": 5, "to_come": 7})
    assert learning.wait_for_memory() == (7 if shares_device else 0)
    assert learning.numbers["state"] == "waiting for texts"


def test_a_full_disk_does_not_keep_a_head_from_being_taken_back(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(learning, 0.6)
    name = offer(learning)
    answer(learning, 0.2)

    def full(self: LearnedHeads) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LearnedHeads, "_write", full)
    learning._look()
    assert learning.serving_name == START != name and learning.numbers["rollbacks"] == 1
