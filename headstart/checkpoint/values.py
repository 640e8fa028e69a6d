"""Values of a tensor source as torch tensors, and sources computed from them.

Only for what cannot be done by moving bytes. Reads go piece by piece into plain memory, so what
is held is bounded by what is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headstart.checkpoint.reader import torch_dtype
from headstart.checkpoint.source import FileSlice, TensorSource, rows

if TYPE_CHECKING:
    import torch

_ROWS_AT_ONCE = 1024


def load(source: TensorSource) -> torch.Tensor:
    """The whole tensor in memory."""
    import torch

    data = bytearray(source.num_bytes)
    position = 0
    for piece in source.pieces():
        if isinstance(piece, FileSlice):
            target = memoryview(data)[position : position + piece.num_bytes]
            _read_into(target, piece)
            position += piece.num_bytes
        else:
            data[position : position + len(piece)] = piece
            position += len(piece)
    dtype = torch_dtype(source.dtype)
    if not data:
        return torch.empty(source.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(source.shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, copied only if it is not contiguous."""
    import torch

    array = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return memoryview(array.data)


def swapped_halves(source: TensorSource) -> TensorSource:
    """A [rows, 2n] matrix with its two column halves exchanged."""
    count, columns = source.shape

    def pieces() -> Iterator[memoryview]:
        for start in range(0, count, _ROWS_AT_ONCE):
            part = load(rows(source, start, min(start + _ROWS_AT_ONCE, count)))
            yield as_bytes(part.roll(columns // 2, dims=1))

    return TensorSource(source.dtype, source.shape, pieces, is_copy=False)


def _read_into(target: memoryview, piece: FileSlice) -> None:
    handle = os.open(piece.file, os.O_RDONLY)
    try:
        done = 0
        while done < piece.num_bytes:
            count = os.preadv(handle, [target[done:]], piece.start + done)
            if count == 0:
                raise OSError(f"{piece.file} became shorter while it was read")
            done += count
    finally:
        os.close(handle)
