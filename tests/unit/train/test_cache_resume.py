"""Writers of the state cache that were stopped: nothing half-read, nothing asked for twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cache_records import HEADER, SHARD_BYTES, check_whole, fill, states

from headstart.errors import DataError
from headstart.files import partial_of
from headstart.train.states.cache import StateCache
from headstart.train.states.header import HEADER_NAME
from headstart.train.states.writer import LOCK_NAME, CacheWriter


def test_an_unfinished_cache_is_not_read_and_can_be_gone_on_with(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, HEADER, shard_bytes=SHARD_BYTES) as writer:
        for number in range(5):
            writer.add(f"r{number}", states(number))
    assert not StateCache.is_finished(tmp_path)
    with pytest.raises(DataError, match=r"is unfinished.*goes on where it stopped"):
        StateCache.open(tmp_path, HEADER)
    with CacheWriter(tmp_path, HEADER, shard_bytes=SHARD_BYTES) as writer:
        assert len(writer) == 5 and "r4" in writer and "r5" not in writer
    fill(tmp_path)
    assert StateCache.is_finished(tmp_path)
    check_whole(tmp_path)
    untouched = tmp_path.parent / "at-once"
    fill(untouched)
    for path in untouched.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_a_header_that_a_kill_tore_does_not_block_the_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    partial_of(tmp_path / HEADER_NAME).write_text('{"format')
    fill(tmp_path)
    check_whole(tmp_path)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from support.cache_records import HEADER, SHARD_BYTES, CacheWriter, states
with CacheWriter(Path({folder!r}), HEADER, shard_bytes=SHARD_BYTES) as writer:
    for number in range(10_000):
        writer.add(f"r{{number}}", states(number))
        print(number, flush=True)
"""


def test_a_killed_writer_leaves_nothing_readable_and_loses_nothing_it_reported(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cache"
    code = KILLED.format(here=str(Path(__file__).parents[2]), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 40:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    process.wait()
    with pytest.raises(DataError, match="is unfinished"):
        StateCache.open(folder, HEADER)
    with CacheWriter(folder, HEADER, shard_bytes=SHARD_BYTES) as writer:
        kept = len(writer)
        assert kept >= 41 and f"r{kept - 1}" in writer
    fill(folder, records=range(kept + 3))
    check_whole(folder, range(kept + 3))


@pytest.mark.parametrize("harm", ["torn line", "lost bytes", "wrong bytes", "spare bytes"])
def test_going_on_cuts_off_what_the_files_do_not_bear_out(tmp_path: Path, harm: str) -> None:
    with CacheWriter(tmp_path, HEADER, shard_bytes=SHARD_BYTES) as writer:
        for number in range(8):
            writer.add(f"r{number}", states(number))
    journal = tmp_path / "journal.jsonl"
    last = json.loads(journal.read_text().splitlines()[-1])
    shard = tmp_path / f"shard-{last['shard']:05d}.bin"
    if harm == "torn line":
        os.truncate(journal, journal.stat().st_size - 5)
    elif harm == "lost bytes":
        os.truncate(shard, last["end"] - 1)
    elif harm == "wrong bytes":
        data = bytearray(shard.read_bytes())
        data[last["end"] - 1] ^= 1
        shard.write_bytes(data)
    else:
        with open(shard, "ab") as file:
            file.write(b"half a record")
        (tmp_path / f"shard-{last['shard'] + 1:05d}.bin").write_bytes(b"x")
    with CacheWriter(tmp_path, HEADER, shard_bytes=SHARD_BYTES) as writer:
        assert len(writer) == (8 if harm == "spare bytes" else 7)
    fill(tmp_path)
    check_whole(tmp_path)


def test_a_cache_that_another_process_finishes_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was emptied, as if it had never been begun."""
    lock = CacheWriter._lock

    def later(writer: CacheWriter) -> None:
        monkeypatch.setattr(CacheWriter, "_lock", lock)
        fill(tmp_path)
        lock(writer)

    monkeypatch.setattr(CacheWriter, "_lock", later)
    with pytest.raises(DataError, match="holds a finished state cache"):
        CacheWriter(tmp_path, HEADER, shard_bytes=SHARD_BYTES)
    check_whole(tmp_path)


def test_a_full_disk_is_reported_and_what_was_stored_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CacheWriter(tmp_path, HEADER, shard_bytes=SHARD_BYTES)
    writer.add("r0", states(0))

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write", full)
    with pytest.raises(DataError, match=r"r1 could not be written .*No space left.*run again"):
        writer.add("r1", states(1))
    fill(tmp_path)
    check_whole(tmp_path)
