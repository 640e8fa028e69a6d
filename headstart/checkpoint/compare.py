"""Equality and checksums of parts of files, at the speed of the page cache.

Reads go into two fixed buffers: no page faults, no new memory per chunk, whatever the size.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator

from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.source import FileSlice

_CHUNK_BYTES = 1 << 20  # small enough to stay in a core's cache


def same_bytes(left: TensorInfo, right: TensorInfo) -> bool:
    """Whether two stored tensors have equal dtype, shape and content."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return equal_slices(FileSlice(left.file, left.start, left.end), [as_slice(right)])


def as_slice(info: TensorInfo) -> FileSlice:
    return FileSlice(info.file, info.start, info.end)


class Buffers:
    """Two buffers to compare through; a thread that compares often keeps a pair."""

    def __init__(self) -> None:
        self.left, self.right = bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)


def equal_slices(
    whole: FileSlice, parts: Iterable[FileSlice], buffers: Buffers | None = None
) -> bool:
    """Whether `whole` holds the bytes of `parts`, one after another."""
    position = whole.start
    buffers = buffers or Buffers()
    left, right = buffers.left, buffers.right
    with open(whole.file, "rb", buffering=0) as target:
        for part in parts:
            with open(part.file, "rb", buffering=0) as source:
                for start, size in _spans(part):
                    if position + size > whole.end:
                        return False
                    a = _read(target.fileno(), left, position, size)
                    b = _read(source.fileno(), right, start, size)
                    # Whole buffers compare by memcmp without a copy; only a last chunk is cut.
                    full = size == len(left)
                    same = left == right if full else left[:size] == memoryview(right)[:size]
                    if a != size or b != size or not same:
                        return False
                    position += size
    return position == whole.end


def checksum(part: FileSlice) -> int:
    """CRC-32 of the bytes of `part`."""
    value, buffer = 0, bytearray(_CHUNK_BYTES)
    with open(part.file, "rb", buffering=0) as handle:
        for start, size in _spans(part):
            count = _read(handle.fileno(), buffer, start, size)
            value = zlib.crc32(memoryview(buffer)[:count], value)
    return value


def _spans(part: FileSlice) -> Iterator[tuple[int, int]]:
    for start in range(part.start, part.end, _CHUNK_BYTES):
        yield start, min(_CHUNK_BYTES, part.end - start)


def _read(handle: int, buffer: bytearray, start: int, size: int) -> int:
    """Fill buffer[:size] from `start`; returns how many bytes there were."""
    view, count = memoryview(buffer), 0
    while count < size:
        done = os.preadv(handle, [view[count:size]], start + count)
        if done == 0:
            break
        count += done
    return count
