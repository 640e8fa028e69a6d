"""Values of a tensor source as torch tensors, and sources computed from them.

Only for what cannot be done by moving bytes. Reads go piece by piece into plain memory, so what
is held is bounded by what is asked for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from headstart.checkpoint.reader import dtype_name, torch_dtype
from headstart.checkpoint.source import FileSlice, TensorSource, rows
from headstart.errors import ShapeMismatch

if TYPE_CHECKING:
    import torch

_ROWS_AT_ONCE = 1024
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BLOCK = 1 << 17


def load(source: TensorSource) -> torch.Tensor:
    """The whole tensor in memory."""
    import torch

    # Python's own arrays are filled with zeros first, while all other threads wait.
    found = torch.empty(source.num_bytes, dtype=torch.uint8, device="cpu")
    data, position = memoryview(found.numpy().data), 0
    for piece in source.pieces():
        size = piece.num_bytes if isinstance(piece, FileSlice) else len(piece)
        target = data[position : position + size]
        if isinstance(piece, FileSlice):
            _read_into(target, piece)
        else:
            target[:] = piece
        position += size
    assert position == source.num_bytes, "a source holds what its shape says"
    return found.view(torch_dtype(source.dtype)).view(source.shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, copied only if it is not contiguous."""
    import torch

    array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array.data)


def in_memory(tensor: torch.Tensor) -> TensorSource:
    """A CPU tensor, to be written as it is."""
    name = dtype_name(tensor.dtype)
    return TensorSource(name, tuple(tensor.shape), lambda: (as_bytes(tensor),), is_copy=False)


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in FP32; FP8 (E4M3) several times faster than torch converts it."""
    import torch

    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.to(torch.float32)
    raw = tensor.contiguous().view(torch.int8)
    # FP16 with the exponent and mantissa of FP8 is the value over 256, subnormals included. The
    # sign fills the upper byte; its copy in the exponent's upper bit is masked out.
    half = raw.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = half.view(torch.float16).to(torch.float32).mul_(256.0)
    if raw.numel() and int(raw.bitwise_and(0x7F).max()) == 0x7F:
        values[raw.bitwise_and(0x7F) == 0x7F] = float("nan")  # all ones, which came out as 480
    return values


@cache
def return_freed_memory() -> None:
    """Give large freed blocks back at once; the allocator would keep more and more of them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, others need it less
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small operators: threads that wait for each other on busy cores cost far more."""
    import torch

    return_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def swapped_halves(source: TensorSource) -> TensorSource:
    """A [rows, 2n] matrix with its two column halves exchanged."""
    if len(source.shape) != 2 or source.shape[1] % 2:
        raise ShapeMismatch(
            f"the fusion matrix has shape {list(source.shape)}; expected [rows, 2 x hidden size]. "
            "The file is damaged: download or export it again."
        )
    count, columns = source.shape

    def pieces() -> Iterator[memoryview]:
        with one_thread():
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
                raise piece.cut_off()
            done += count
    finally:
        os.close(handle)
