"""A tensor that can be written: its dtype, its shape, and where its bytes come from.

Most tensors are slices of existing files and are never loaded. Packing or unpacking experts is
concatenating or cutting such slices. What has to be computed is computed piece by piece, so memory
stays bounded by one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.header import TensorInfo
from headstart.errors import BrokenFile

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class FileSlice:
    """Bytes [start, end) of a file."""

    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def cut_off(self) -> BrokenFile:
        """The error for a file that ends before the slice, although its header was checked."""
        return BrokenFile(
            f"{self.file} became shorter while it was read. Nothing was kept; run again while no "
            "other program writes to it."
        )


Piece = FileSlice | Buffer


@dataclass(frozen=True)
class TensorSource:
    """What to write under a name; `pieces()` yields its bytes in order, as often as asked."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Piece]]
    is_copy: bool  # True: only FileSlices, so the bytes are those of a stored tensor

    @property
    def num_bytes(self) -> int:
        return byte_size(self.dtype, self.shape)


def stored(info: TensorInfo) -> TensorSource:
    """The tensor exactly as it is stored."""
    piece = FileSlice(info.file, info.start, info.end)
    return TensorSource(info.dtype, info.shape, lambda: (piece,), is_copy=True)


def rows(source: TensorSource, start: int, stop: int) -> TensorSource:
    """Rows [start, stop) of a source whose pieces are all file slices."""
    row_bytes = byte_size(source.dtype, source.shape[1:])
    first, last = start * row_bytes, stop * row_bytes
    return TensorSource(
        source.dtype,
        (stop - start, *source.shape[1:]),
        lambda: _cut(source.pieces(), first, last),
        source.is_copy,
    )


def concatenated(parts: list[TensorSource], shape: tuple[int, ...]) -> TensorSource:
    """Parts one after another along the first axis, seen as `shape`."""
    return TensorSource(
        parts[0].dtype,
        shape,
        lambda: (piece for part in parts for piece in part.pieces()),
        all(part.is_copy for part in parts),
    )


def reshaped(source: TensorSource, shape: tuple[int, ...]) -> TensorSource:
    """The same bytes seen as another shape."""
    return TensorSource(source.dtype, shape, source.pieces, source.is_copy)


def _cut(pieces: Iterable[Piece], first: int, last: int) -> Iterator[Piece]:
    position = 0
    for piece in pieces:
        size = piece.num_bytes if isinstance(piece, FileSlice) else len(piece)
        begin, end = max(first - position, 0), min(last - position, size)
        if begin < end:
            if isinstance(piece, FileSlice):
                yield FileSlice(piece.file, piece.start + begin, piece.start + end)
            else:
                yield memoryview(piece)[begin:end]
        position += size
