from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from support.checkpoint_files import info

from headstart.checkpoint import compare
from headstart.checkpoint.compare import checksum, equal_slices, same_bytes
from headstart.checkpoint.source import FileSlice


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK_BYTES", 4)


def written(path: Path, data: bytes) -> FileSlice:
    path.write_bytes(data)
    return FileSlice(path, 0, len(data))


@pytest.mark.parametrize("changed", range(10), ids=lambda n: f"byte{n}")
def test_one_changed_byte_anywhere_is_seen(tmp_path: Path, changed: int) -> None:
    data = bytearray(b"0123456789")
    left = written(tmp_path / "a", bytes(data))
    data[changed] ^= 1
    right = written(tmp_path / "b", bytes(data))
    assert equal_slices(left, [left])
    assert not equal_slices(left, [right])
    assert checksum(left) != checksum(right)


def test_a_whole_equals_its_parts_from_several_files(tmp_path: Path) -> None:
    whole = written(tmp_path / "a", b"0123456789")
    first, second = written(tmp_path / "b", b"x01234"), written(tmp_path / "c", b"56789")
    assert equal_slices(whole, [FileSlice(first.file, 1, 6), second])
    assert not equal_slices(whole, [FileSlice(first.file, 1, 6)]), "too short"
    assert not equal_slices(whole, [FileSlice(first.file, 1, 6), second, second]), "too long"


def test_a_file_shorter_than_claimed_is_not_equal(tmp_path: Path) -> None:
    left = written(tmp_path / "a", b"012345")
    short = written(tmp_path / "b", b"0123")
    assert not equal_slices(left, [FileSlice(short.file, 0, 6)])


def test_empty_slices_are_equal(tmp_path: Path) -> None:
    empty = written(tmp_path / "a", b"")
    assert equal_slices(empty, [])
    assert equal_slices(empty, [empty])


def test_the_checksum_is_crc32(tmp_path: Path) -> None:
    assert checksum(written(tmp_path / "a", b"0123456789")) == zlib.crc32(b"0123456789")


def test_tensors_of_another_dtype_differ_whatever_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"01")
    left, right = info(tmp_path / "a", 0, 2), info(tmp_path / "a", 0, 2, dtype="I8")
    assert same_bytes(left, left)
    assert not same_bytes(left, right)
