"""The learning loop with a training that is scripted: what is offered, refused, and given up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from support.scripted_training import Scripted

from headstart.learn.loop import Base, LearningLoop
from headstart.learn.mixing import Mix
from headstart.learn.reading import newest_answers
from headstart.learn.store import Store, TextWriter
from headstart.learn.texts import Text


def make(
    tmp_path: Path, training: Scripted, *, texts: int = 100, ahead: Sequence[Any] = ()
) -> tuple[LearningLoop, list[tuple[str, Any]]]:
    add(tmp_path, texts)
    told: list[tuple[str, Any]] = []
    ticks = iter(range(10**6))
    loop = LearningLoop(
        Store(tmp_path, 1 << 20), training, Base(), lambda: tmp_path / "0001",
        lambda name, facts: told.append((name, facts)), batch_tokens=20, least_seconds=3,
        clock=lambda: float(next(ticks)), ahead=ahead,
    )  # fmt: skip
    return loop, told


def add(tmp_path: Path, count: int) -> None:
    with TextWriter(tmp_path) as writer:
        writer.add(
            Text(id=f"t{i}", prompt=[i, 2], answer=[3] * 9, kind="a", time=float(i),
                 finish_reason="stop") for i in range(count)
        )  # fmt: skip


def names(told: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in told]


def test_a_better_head_is_offered_and_nothing_is_done_until_it_is_answered(tmp_path: Path) -> None:
    training = Scripted(gain=0.1)
    loop, told = make(tmp_path, training)
    while "offer" not in names(told):
        assert loop.turn()
    assert not loop.turn(), "it waits for the server"
    loop.served(tmp_path / "0001")
    assert training.calls == ["write 0001 at 1.0", "adopt at 1.0"] and loop.turn()
    offer = dict(told)["offer"]
    assert offer["name"] == "0001" and offer["promise"]["recent"]["new"] > 1.5
    assert list(offer["promise"]["by_kind"]) == ["1"], "what is kept with a head has no words"
    assert list(dict(told)["checked"]["by_kind"]) == ["a"]


def test_a_head_that_gets_no_better_rests_until_there_is_more(tmp_path: Path) -> None:
    training = Scripted()
    loop, told = make(tmp_path, training)
    while loop.turn():
        assert training.num_steps < 500
    assert names(told)[-1] == "rests" and "offer" not in names(told)
    assert training.rates[0] == 1.0 and training.rates[-1] == pytest.approx(1 / 16)
    with TextWriter(tmp_path) as writer:
        writer.add(
            Text(id=f"n{i}", prompt=[i, 5], answer=[3] * 9, kind="a", time=200.0 + i,
                 finish_reason="stop") for i in range(40)
        )  # fmt: skip
    loop._reading.next_look = 0
    assert loop.turn(), "more texts wake it"


def test_a_worse_head_is_dropped(tmp_path: Path) -> None:
    training = Scripted(gain=-0.05)
    loop, told = make(tmp_path, training)
    while "reset" not in training.calls:
        assert loop.turn()
    assert "offer" not in names(told) and training.rates[-1] == 1.0
    loop.turn()
    assert training.rates[-1] == 0.5


def test_learning_slows_down_and_rests_where_heads_are_taken_back(tmp_path: Path) -> None:
    """Regression: a head whose promise never came was learned, served and taken back for ever."""
    training = Scripted(gain=0.1)
    loop, told = make(tmp_path, training)
    for number in range(1, 6):
        while names(told).count("offer") < number:
            assert loop.turn()
        loop.served(tmp_path / "0001")
        loop.served(tmp_path / "start")
        assert loop.is_waiting == (number == 5)
    assert training.calls.count("serve start") == 5 and names(told)[-1] == "rests"
    assert sorted(set(training.rates)) == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]


def test_a_step_that_diverges_starts_anew_at_half_the_rate(tmp_path: Path) -> None:
    training = Scripted(fails_at=2)
    loop, told = make(tmp_path, training)
    for _ in range(3):
        loop.turn()
    assert training.calls == ["reset"] and training.rates == [1.0, 1.0, 0.5]
    assert "nan" in dict(told)["diverged"]["reason"]


def test_a_full_disk_when_a_head_is_written_is_said_and_learning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Scripted(gain=0.1)
    loop, told = make(tmp_path, training)

    def full(out: Path, details: dict[str, Any], share: float) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "write", full)
    while "failed" not in names(told):
        loop.turn()
    assert "No space left" in dict(told)["failed"]["reason"] and loop.turn()


def test_tokens_of_texts_that_come_before_thinning_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a step met a token that losses had no place for, and the learner ended."""
    training = Scripted()
    loop, told = make(tmp_path, training)
    loop._reading.store.max_bytes = sum(path.stat().st_size for path in tmp_path.iterdir()) // 2
    thin = Store.thin

    def late(store: Store) -> int:
        with TextWriter(tmp_path) as writer:
            writer.add([Text(id="late", prompt=[1], answer=[77], kind="a", time=200.0,
                             finish_reason="stop")])  # fmt: skip
        return thin(store)

    monkeypatch.setattr(Store, "thin", late)
    loop.turn()
    assert "late" in loop._reading.store.texts and 77 in training.seen
    assert dict(told)["thinned"]["dropped"] > 0


def test_a_full_disk_when_texts_are_thinned_out_is_said_and_learning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the learner ended, was started again three times, and learning was over."""
    loop, told = make(tmp_path, Scripted())

    def full(store: Store) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "thin", full)
    for _ in range(3):
        loop._reading.next_look = 0
        assert loop.turn()
    assert "No space left" in dict(told)["crowded"]["reason"]
    assert names(told).count("crowded") == 1, "not every second"


def test_nothing_is_learned_from_answers_that_begin_too_late(tmp_path: Path) -> None:
    """Regression: steps of such texts were empty, took no time, and were told by the thousand."""
    training = Scripted()
    training.max_len = 2
    loop, told = make(tmp_path, training, texts=3)
    assert not loop.turn() and training.num_steps == 0
    assert dict(told)["kinds"] == {"kinds": []}
    assert dict(told)["texts"] == {"train": 0, "heldout": 0, "bytes": ANY, "useless": 3}


def test_a_prompt_that_comes_again_and_again_is_compared_on_once() -> None:
    texts = [
        Text(id=f"t{i}", prompt=[i % 3], answer=[i, 2], kind="", time=float(i),
             finish_reason="stop") for i in range(8)
    ]  # fmt: skip
    found = newest_answers(text.record() for text in texts)
    assert [record.id for record in found] == ["t5", "t6", "t7"]


def test_few_texts_are_waited_for(tmp_path: Path) -> None:
    loop, _ = make(tmp_path, Scripted())
    loop._reading.store = Store(tmp_path / "none", 1)
    assert not loop.turn()


@pytest.mark.parametrize("room", [7, 10**6], ids=["no room", "room"])
def test_states_of_the_base_are_prepared_while_texts_are_awaited(room: int, tmp_path: Path) -> None:
    training = Scripted()
    training.room = room
    ahead = [
        Text(id=f"b{i}", prompt=[1], answer=[2] * 499, kind="", time=0.0,
             finish_reason="stop").record() for i in range(9)
    ]  # fmt: skip
    loop, told = make(tmp_path, training, texts=3, ahead=ahead)
    assert loop.turn() and training.prepared == ["b0", "b1", "b2"], "a piece in one turn"
    add(tmp_path, 100)
    loop._reading.next_look = 0
    assert loop.turn() and training.num_steps == 1 and len(training.prepared) == 3
    while loop.turn():  # until it rests
        assert training.num_steps < 500
    assert training.prepared == [f"b{i}" for i in range(9)]
    found = [facts for name, facts in told if name == "base"]
    assert [facts["is_done"] for facts in found] == [False, False, True]
    assert found[-1]["prepared"] == (6 if room == 7 else 9) and found[-1]["of"] == 9
    assert not loop.turn(), "once"


def test_the_base_gets_its_share_of_the_tokens() -> None:
    def records(name: str, count: int) -> list[Any]:
        return [Text(id=f"{name}{i}", prompt=[1], answer=[2] * 10, kind="", time=0.0,
                     finish_reason="stop").record() for i in range(count)]  # fmt: skip

    mix = Mix(records("base", 50), 0.4)
    mix.replace(records("text", 50))
    drawn = [record.id for _ in range(50) for record in mix.step(100)]
    share = sum(name.startswith("base") for name in drawn) / len(drawn)
    assert 0.35 < share < 0.5
    newer = {f"text{i}" for i in range(25, 50)}
    texts = [name for name in drawn if name.startswith("text")]
    assert 0.65 < sum(name in newer for name in texts) / len(texts) < 0.85
