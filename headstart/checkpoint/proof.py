"""Reads what was just written back and compares it with what it was made from.

A result is only installed after every tensor was found under its name with its dtype, shape and
bytes: those copied are compared with their source, those computed with the checksum taken as
they were written. Comparing runs in a thread of its own, behind the writer; `Proof.finish` waits
for it and raises what it found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.checkpoint.compare import Buffers, checksum, equal_slices
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.source import FileSlice
from headstart.errors import WriteFailed

if TYPE_CHECKING:
    from headstart.checkpoint.writer import NewFile

_REMEDY = "The source was changed meanwhile, or the disk is failing; run again, then check it."


class Proof:
    """Everything that was written and is still to be compared."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._checks: list[Future[None]] = []
        self._buffers = Buffers()

    def __enter__(self) -> Proof:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def copied(self, written: FileSlice, name: str, pieces: list[FileSlice]) -> None:
        """`written` is to hold the bytes of `pieces`."""
        self._checks.append(self._pool.submit(_check_copy, written, name, pieces, self._buffers))

    def computed(self, written: FileSlice, name: str, expected: int) -> None:
        """`written` is to have the checksum that its bytes had in memory."""
        self._checks.append(self._pool.submit(_check_sum, written, name, expected))

    def shard(self, file: Path, shard: NewFile, places: Mapping[str, FileSlice]) -> None:
        """The header of `file` is to name exactly these tensors, in these places."""
        self._checks.append(self._pool.submit(_check_header, file, shard, dict(places)))

    def file(self, file: Path, source: Path) -> None:
        """`file` is to equal `source`."""
        self._checks.append(self._pool.submit(_check_file, file, source, self._buffers))

    def finish(self) -> None:
        for check in self._checks:
            check.result()


def _check_copy(written: FileSlice, name: str, pieces: list[FileSlice], buffers: Buffers) -> None:
    if not equal_slices(written, pieces, buffers):
        raise WriteFailed(f"{written.file.name}: {name} does not read back as written. {_REMEDY}")


def _check_sum(written: FileSlice, name: str, expected: int) -> None:
    if checksum(written) != expected:
        raise WriteFailed(f"{written.file.name}: {name} does not read back as written. {_REMEDY}")


def _check_header(file: Path, shard: NewFile, places: Mapping[str, FileSlice]) -> None:
    expected = {
        name: TensorInfo(name, source.dtype, source.shape, file, place.start, place.end)
        for name, source in shard.tensors.items()
        if (place := places.get(name)) is not None
    }
    if shard.read_back(file) != expected or len(expected) != len(shard.tensors):
        raise WriteFailed(f"{file.name}: read back other tensors than were written. {_REMEDY}")


def _check_file(file: Path, source: Path, buffers: Buffers) -> None:
    if os.path.samefile(file, source):
        return
    sizes = (file.stat().st_size, source.stat().st_size)
    whole = FileSlice(source, 0, sizes[1])
    if sizes[0] != sizes[1] or not equal_slices(FileSlice(file, 0, sizes[0]), [whole], buffers):
        raise WriteFailed(f"{file.name} does not read back as {source}. {_REMEDY}")
