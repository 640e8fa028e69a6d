"""Single files appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headstart.files import partial_of, write_whole


@pytest.mark.parametrize("is_only_writer", [True, False])
def test_a_file_is_replaced_and_nothing_stays_beside_it(
    tmp_path: Path, is_only_writer: bool
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    write_whole(path, b"new", is_only_writer=is_only_writer)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("is_only_writer", [True, False])
def test_on_a_failure_the_older_one_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_only_writer: bool, failing: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new", is_only_writer=is_only_writer)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_path_without_a_name_is_an_error_of_the_system(path: str) -> None:
    with pytest.raises(OSError):
        write_whole(Path(path), b"new")


def test_what_a_kill_left_is_taken_away_by_the_only_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    partial_of(path).write_text("a longer half")
    write_whole(path, b"new", is_only_writer=True)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_writers_at_once_do_not_share_a_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one writes while ours is on its way to the disk."""
    path, sync = tmp_path / "a.json", os.fsync

    def meanwhile(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_whole(path, b"other")
        assert path.read_bytes() == b"other"

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_whole(path, b"ours")
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_what_a_kill_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    left, foreign = tmp_path / ".a.json.partial-0123abcd", tmp_path / ".a.json.partial-mine"
    for each in (left, foreign):
        each.write_text("half")
    write_whole(path, b"new")
    assert not left.exists() and foreign.exists() and path.read_bytes() == b"new"


def test_what_another_one_is_writing_stays(tmp_path: Path) -> None:
    path, busy = tmp_path / "a.json", tmp_path / ".a.json.partial-0123abcd"
    with open(busy, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole(path, b"new")
        assert busy.exists()


def test_many_writers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    texts = [bytes([65 + number]) * 5000 for number in range(4)]

    def write(data: bytes) -> None:
        for _ in range(40):
            write_whole(path, data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    assert path.read_bytes() in texts and list(tmp_path.iterdir()) == [path]
