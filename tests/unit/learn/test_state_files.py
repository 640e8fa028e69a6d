"""States of texts on disk: what is read back, what a kill or damage costs, what makes room."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from support.state_files import record, rows

from headstart.learn import state_files
from headstart.learn.folder import Folder, forget
from headstart.learn.state_files import BASE, SERVED, StateWriter, StoredStates, remove_bases
from headstart.learn.store import Store, TextWriter
from headstart.learn.texts import Text

KIND = "after_final_norm"
WIDTH = 4


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "_LOOK_SECONDS", -1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    own = Folder(tmp_path / "learn")
    own.make(1)
    return own


def reader(folder: Folder, width: int = WIDTH) -> StoredStates:
    return StoredStates(folder.states, KIND, width)


def has(stored: StoredStates, name: str) -> bool:
    return stored.has(record(name, 1))


def written(folder: Folder, *counts: int, max_bytes: int = 1 << 20) -> Path:
    """A file with states of texts t0, t1, ... of so many rows."""
    writer = StateWriter(folder, SERVED, max_bytes)
    for number, count in enumerate(counts):
        assert writer.add(f"t{number}", KIND, rows(count, number)) > 0
    writer.close()
    return max(folder.states.iterdir())


def test_states_survive_the_disk_and_are_their_owners_alone(folder: Folder) -> None:
    path = written(folder, 5, 3)
    stored = reader(folder)
    found = stored.find(record("t0", 5))
    assert found is not None and torch.equal(found, rows(5, 0))
    last = stored.find(record("t1", 4))  # its last token was never computed
    assert last is not None and torch.equal(last[:3], rows(3, 1)) and not last[3].any()
    cut = stored.find(record("t0", 2))
    assert cut is not None and torch.equal(cut, rows(5, 0)[:2])
    assert not has(stored, "t2") and stored.find(record("t1", 5)) is None, "two are missing"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_states_of_another_kind_or_width_are_not_taken(folder: Folder) -> None:
    written(folder, 5)
    assert StoredStates(folder.states, "before_final_norm", WIDTH).find(record("t0", 5)) is None
    assert reader(folder, 2 * WIDTH).find(record("t0", 5)) is None


@pytest.mark.parametrize("kept", [10, 90, 150], ids=["in a line", "in rows", "in the second"])
def test_a_kill_costs_the_text_that_was_being_written(folder: Folder, kept: int) -> None:
    path = written(folder, 5, 5)
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    stored = reader(folder)
    whole = len(data) // 2 <= kept
    assert has(stored, "t0") == whole and not has(stored, "t1")
    path.write_bytes(data)  # it was only being written
    assert has(stored, "t0") and has(stored, "t1")
    written(folder, 2)  # a server that starts again begins another file
    assert len(list(folder.states.iterdir())) == 2


def test_damage_costs_states_and_is_never_learned_from(folder: Folder) -> None:
    path = written(folder, 5, 5, 5)
    data = bytearray(path.read_bytes())
    size = len(data) // 3
    data[size - 3] ^= 1  # a row of the first
    data[size] = ord("x")  # the second's line, so that the third is not found
    path.write_bytes(data)
    stored = reader(folder)
    assert stored.find(record("t0", 5)) is None and not has(stored, "t0")
    assert not has(stored, "t1") and not has(stored, "t2")
    bad = torch.full((3, WIDTH), torch.nan, dtype=torch.bfloat16)
    writer = StateWriter(folder, SERVED, 1 << 20)
    writer.add("t3", KIND, bad)
    writer.close()
    assert has(stored, "t3") and stored.find(record("t3", 3)) is None
    assert not has(stored, "t3"), "it would be read again and again"


def test_states_of_a_text_that_was_shorter_are_taken_until_there_are_longer_ones(
    folder: Folder,
) -> None:
    """`max_len` cuts texts, and may be another one at the next start."""
    written(folder, 3)
    stored, longer = reader(folder), record("t0", 5)
    assert not stored.has(longer) and stored.find(longer) is None
    assert stored.has(record("t0", 4)) and stored.find(record("t0", 4)) is not None
    written(folder, 5)
    found = stored.find(longer)
    assert stored.has(longer) and found is not None and torch.equal(found, rows(5, 0))


def test_older_served_states_make_room_then_those_of_the_base_and_never_texts(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = StateWriter(folder, f"{BASE}-0123", 4000)
    while base.add("b", KIND, rows(10, 0)):
        pass
    base.close()
    used = state_files.used_bytes(folder)
    assert 1600 < used <= 2000, "half of the room"
    served = StateWriter(folder, SERVED, 4000)
    for number in range(40):
        assert served.add(f"t{number}", KIND, rows(10, number)) > 0
        assert state_files.used_bytes(folder) <= 4000
    stored = reader(folder)
    assert has(stored, "t39") and not has(stored, "t0") and has(stored, "b")
    text = Text(id="t39", prompt=[1] * 1500, answer=[2], kind="", time=0.0, finish_reason="stop")
    with TextWriter(folder.texts) as texts:
        texts.add([text])
    assert served.make_room() and state_files.used_bytes(folder) <= 4000
    assert has(reader(folder), "b")
    for number in range(40, 44):
        with TextWriter(folder.texts) as texts:
            texts.add([Text(**{**vars(text), "id": f"t{number}", "prompt": [1] * 250})])
    assert not served.make_room() and not list(folder.states.iterdir())
    assert served.add("t44", KIND, rows(100, 0)) == 0
    served.close()
    assert len(Store(folder.texts, 1 << 20).refresh()) == 5


def test_states_that_cannot_fit_cost_no_others(folder: Folder) -> None:
    base = StateWriter(folder, f"{BASE}-0123", 4000)
    assert base.add("b", KIND, rows(10, 0)) > 0
    base.close()
    served = StateWriter(folder, SERVED, 4000)
    assert served.add("t0", KIND, rows(10, 0)) > 0
    assert served.add("t1", KIND, rows(480, 0)) == 0, "the base's states would have to go"
    stored = reader(folder)
    assert has(stored, "t0") and has(stored, "b")
    served.close()


def test_what_is_written_after_all_states_had_to_go_is_found(folder: Folder) -> None:
    """A reader knows files by name, so no name comes back."""
    served, stored = StateWriter(folder, SERVED, 1 << 20), reader(folder)
    assert served.add("t0", KIND, rows(9, 0)) > 0 and has(stored, "t0")
    for path in folder.states.iterdir():  # by another writer that makes room
        path.unlink()
    assert served.add("t1", KIND, rows(5, 1)) > 0
    assert [path.stem for path in folder.states.iterdir()] == [f"{SERVED}-00000002"]
    found = stored.find(record("t1", 5))
    assert found is not None and torch.equal(found, rows(5, 1))
    served.close()


def test_a_reader_goes_on_when_a_file_is_gone(folder: Folder) -> None:
    path = written(folder, 5)
    stored = reader(folder)
    assert has(stored, "t0")
    path.unlink()
    assert stored.find(record("t0", 5)) is None


def test_a_reader_forgets_what_has_made_room(folder: Folder) -> None:
    """Regression: a learner kept a line for every text that was ever served."""
    served, stored = StateWriter(folder, SERVED, 4000), reader(folder)
    for number in range(100):
        assert served.add(f"t{number}", KIND, rows(10, number)) > 0 and has(stored, f"t{number}")
    served.close()
    assert not has(stored, "none")
    assert len(stored._entries) < 30 and set(stored._read) == {
        p.name for p in folder.states.iterdir()
    }


def test_states_of_another_base_are_removed_and_forget_removes_all(folder: Folder) -> None:
    for name in (f"{BASE}-aa", f"{BASE}-bb", SERVED):
        writer = StateWriter(folder, name, 1 << 20)
        writer.add("t", KIND, rows(2, 0))
        writer.close()
    remove_bases(folder, f"{BASE}-bb")
    assert [path.name for path in sorted(folder.states.iterdir())] == [
        "base-bb-00000001.states", "served-00000001.states",
    ]  # fmt: skip
    said = forget(folder, heads=False)
    assert not list(folder.states.iterdir()) and "2 files of texts and states" in said
    assert "states" in folder.words.read_text()
