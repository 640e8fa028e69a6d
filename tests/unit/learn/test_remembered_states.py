"""Where a learner's states come from: memory, the disk, and the trunk only for what is neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.state_files import record, rows

from headstart.data.records import Record
from headstart.learn import state_files
from headstart.learn.folder import Folder
from headstart.learn.state_files import BASE, SERVED, StateWriter, StoredStates
from headstart.learn.states import RememberedStates
from headstart.train.packing import Row

KIND, WIDTH = "after_final_norm", 4


class Trunk:
    """Computes 1, 2, 3, ... for each text."""

    def __init__(self) -> None:
        self.frozen = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, kind=KIND)
        self.computed: list[str] = []

    def states(self, row: Row) -> torch.Tensor:
        self.computed += row.names
        return torch.cat([computed(own) for own in row.records])


def computed(own: Record) -> torch.Tensor:
    return torch.arange(1.0, len(own.ids) + 1).unsqueeze(1).repeat(1, WIDTH)


_WRITERS: list[StateWriter] = []  # of the test that runs


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(state_files, "_LOOK_SECONDS", -1.0)
    yield
    while _WRITERS:
        _WRITERS.pop().close()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    own = Folder(tmp_path / "learn")
    own.make(1)
    return own


def make(
    folder: Folder | None, max_bytes: int = 1 << 20, room: int = 1 << 20
) -> tuple[RememberedStates, Trunk]:
    trunk: Any = Trunk()
    states = RememberedStates(trunk, max_bytes)
    if folder is not None:
        stored = StoredStates(folder.states, KIND, WIDTH)
        writer = StateWriter(folder, f"{BASE}-0", room)
        states.use_disk(stored, writer)
        _WRITERS.append(writer)
    return states, trunk


def texts(*names: str) -> list[Record]:
    return [record(name, 3 + number) for number, name in enumerate(names)]


def expected(records: Sequence[Record]) -> torch.Tensor:
    return torch.cat([computed(own) for own in records])


def test_served_states_are_read_and_others_are_computed_once(folder: Folder) -> None:
    writer = StateWriter(folder, SERVED, 1 << 20)
    writer.add("b", KIND, rows(4, 0))
    writer.close()
    states, trunk = make(folder)
    a, b, c = texts("a", "b", "c")
    for _ in range(2):
        found = states.states(Row((a, b, a, c)))  # a step may hold a text twice
        wanted = torch.cat([computed(a), rows(4, 0).float(), computed(a), computed(c)])
        assert torch.equal(found, wanted)
    assert trunk.computed == ["a", "c"]
    assert states.num_bytes == 4 * WIDTH * (3 + 5), "what is on disk is not in memory, too"


def test_what_was_prepared_is_there_for_the_next_learner(folder: Folder) -> None:
    some = texts("a", "b", "c")
    states, trunk = make(folder)
    states.states(Row((some[0],)))
    assert states.prepare(some) and trunk.computed == ["a", "b", "c"]
    assert states.prepare(some), "nothing is left to do"
    again, other = make(folder)
    assert again.prepare(some) and torch.equal(again.states(Row(tuple(some))), expected(some))
    assert other.computed == [] and trunk.computed == ["a", "b", "c"]


def test_what_was_prepared_of_shorter_texts_is_prepared_again(folder: Folder) -> None:
    """Where the next learner cuts texts later, what is on disk is too short for it."""
    short, long = record("a", 3), record("a", 8)
    states, trunk = make(folder)
    assert states.prepare([short]) and trunk.computed == ["a"]
    for computed_by_it in (["a"], []):
        again, other = make(folder)
        assert again.prepare([long]) and other.computed == computed_by_it
        assert torch.equal(again.states(Row((long,))), expected([long]))
        assert other.computed == computed_by_it


@pytest.mark.parametrize("on_disk", [False, True], ids=["no disk", "a full one"])
def test_what_the_disk_does_not_take_is_prepared_within_memory(
    on_disk: bool, folder: Folder
) -> None:
    some = texts("a", "b", "c")
    states, trunk = make(folder if on_disk else None, max_bytes=3 * 16 + 4 * 16, room=10)
    assert states.prepare(some[:2]) and not states.prepare(some[2:])
    assert torch.equal(states.states(Row(tuple(some[:2]))), expected(some[:2]))
    assert trunk.computed == ["a", "b", "c"] and states.num_bytes == 7 * 16


def test_memory_is_bounded_and_what_was_not_used_goes_first() -> None:
    some = texts("a", "b", "c")
    states, trunk = make(None, max_bytes=8 * 16)
    states.states(Row((some[0],)))
    states.states(Row((some[1],)))
    states.states(Row((some[0],)))
    states.states(Row((some[2],)))
    assert states.num_bytes <= 8 * 16
    states.states(Row((some[0],)))
    assert trunk.computed == ["a", "b", "c"]
    states.states(Row((some[1],)))
    assert trunk.computed == ["a", "b", "c", "b"]


def test_states_of_texts_that_are_gone_are_forgotten() -> None:
    """Regression: a learner's memory grew with the texts of a store that was full."""
    own, trunk = make(None)
    texts = record("a", 3), record("b", 5)
    own.states(Row(texts))
    own.forget(lambda name: name == "a")
    assert own.num_bytes == computed(texts[1]).nbytes
    own.states(Row(texts))
    assert trunk.computed == ["a", "b", "a"]
