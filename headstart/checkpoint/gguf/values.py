"""Values of GGUF tensors: cast, quantised, dequantised and rearranged, a few rows at a time.

By numpy alone: importing torch takes longer than copying a gigabyte, and a head has few values
that are not copied. `encoding.py` reads and writes each type; K-quants are made by llama.cpp's own
tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.gguf.encoding import PLAIN, decoded, encoded, require_castable
from headstart.checkpoint.gguf.quantize_tool import TYPES, quantized_by_tool
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.errors import ShapeMismatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

_VALUES_AT_ONCE = _BYTES_AT_ONCE = 1 << 20


def cast(source: TensorSource, kind: str) -> TensorSource:
    """The same values as another type, rounded to nearest; the source itself where it has it."""
    if source.dtype == kind:
        return source
    if kind in TYPES and source.dtype in PLAIN:
        return quantized_by_tool(source, kind)
    if kind in TYPES:  # the tool does not read what is quantised already
        return quantized_by_tool(cast(source, "F32"), kind)
    require_castable(source.dtype, kind)
    return _mapped(source, kind, lambda values: values)


def shifted(source: TensorSource, by: float, kind: str = "F32") -> TensorSource:
    """Every value plus `by`, added in FP32."""

    def added(values: Floats) -> Floats:
        import numpy as np

        return values + np.float32(by)

    return _mapped(source, kind, added)


def scaled(source: TensorSource, factors: TensorSource, kind: str) -> TensorSource:
    """Every value times its factor: one for all, or one for each matrix of a stack."""
    count = prod(factors.shape)
    is_stack = len(source.shape) == 3 and count == source.shape[0]
    if 0 in source.shape or not source.shape or (count != 1 and not is_stack):
        raise ShapeMismatch(
            f"a scale of shape {list(factors.shape)} stands beside a weight of shape "
            f"{list(source.shape)}; expected one value, or one for each matrix of a stack. The "
            "file is damaged: download or convert it again."
        )
    each = prod(source.shape[:-1]) // count  # rows that share a factor

    def pieces() -> Iterator[memoryview]:
        import numpy as np

        values, start = floats_of(factors).reshape(-1), 0
        for part in _floats_by_rows(source):
            numbers = np.arange(start, start + len(part)) // each
            yield encoded(part * values[numbers, None], kind)
            start += len(part)

    return TensorSource(kind, source.shape, pieces, is_copy=False)


def transposed(source: TensorSource) -> TensorSource:
    """A stack of matrices, each transposed."""
    count, height, width = source.shape

    def pieces() -> Iterator[memoryview]:
        item = byte_size(source.dtype, (1,))  # plain types alone: a block has no columns to turn
        for raw in byte_blocks(source, byte_size(source.dtype, (height, width))):
            yield _turned(raw, (height, width, item), (1, 0, 2))

    return TensorSource(source.dtype, (count, width, height), pieces, is_copy=False)


def interleaved(parts: list[TensorSource], heights: list[int]) -> TensorSource:
    """Rows of several matrices in turn: `heights[0]` of the first, `heights[1]` of the next, ..."""
    dtype, width = parts[0].dtype, parts[0].shape[-1]
    sizes = [byte_size(dtype, (height, width)) for height in heights]
    total = sum(part.shape[0] for part in parts)

    def pieces() -> Iterator[bytes]:
        blocks = [byte_blocks(part, size) for part, size in zip(parts, sizes, strict=True)]
        for group in zip(*blocks, strict=True):
            yield from group

    return TensorSource(dtype, (total, width), pieces, is_copy=False)


def regrouped(source: TensorSource, outer: int, inner: int) -> TensorSource:
    """Rows in groups of outer * inner, each turned from [outer, inner] to [inner, outer].

    Rows stay whole, so that any type keeps its bytes.
    """
    height, width = source.shape
    row = byte_size(source.dtype, (width,))
    at_once = max(1, _BYTES_AT_ONCE // max(1, outer * inner * row))

    def pieces() -> Iterator[memoryview]:
        for raw in byte_blocks(source, at_once * outer * inner * row):
            yield _turned(raw, (-1, outer, inner, row), (0, 2, 1, 3))

    return TensorSource(source.dtype, (height, width), pieces, is_copy=False)


def picked(source: TensorSource, period: int, start: int, stop: int) -> TensorSource:
    """Rows [start, stop) of every `period` rows: the inverse of `interleaved`."""
    height, width = source.shape
    row = byte_size(source.dtype, (width,))

    def pieces() -> Iterator[bytes]:
        for block in byte_blocks(source, period * row):
            yield block[start * row : stop * row]

    count = height // period
    return TensorSource(source.dtype, (count, stop - start, width), pieces, is_copy=False)


def _turned(raw: bytes, shape: tuple[int, ...], order: tuple[int, ...]) -> memoryview:
    """Bytes seen as `shape`, with the axes in another order."""
    import numpy as np

    moved = np.frombuffer(raw, np.uint8).reshape(shape).transpose(order)
    return np.ascontiguousarray(moved).reshape(-1).data


def floats_of(source: TensorSource) -> Floats:
    """The whole tensor in FP32, in an array of its own."""
    import numpy as np

    raw = b"".join(byte_blocks(cast(source, "F32"), _BYTES_AT_ONCE))
    return np.frombuffer(raw, "<f4").reshape(source.shape).copy()


def byte_blocks(source: TensorSource, size: int) -> Iterator[bytes]:
    """The bytes of a source in blocks of `size`; the last one may be shorter."""
    held = bytearray()
    for piece in source.pieces():
        for part in _parts(piece, size):
            held += part
            while len(held) >= size:
                yield bytes(held[:size])
                del held[:size]
    if held:
        yield bytes(held)


def _parts(piece: Any, size: int) -> Iterator[Any]:
    """A slice of a file is read in steps; what is in memory already comes as it is."""
    if not isinstance(piece, FileSlice):
        yield piece
        return
    with open(piece.file, "rb", buffering=0) as handle:
        handle.seek(piece.start)
        left = piece.num_bytes
        while left:
            found = handle.read(min(left, max(size, 1 << 20)))
            if not found:
                raise piece.cut_off()
            yield found
            left -= len(found)


def _mapped(source: TensorSource, kind: str, change: Callable[[Floats], Floats]) -> TensorSource:
    def pieces() -> Iterator[memoryview]:
        for part in _floats_by_rows(source):
            yield encoded(change(part), kind)

    return TensorSource(kind, source.shape, pieces, is_copy=False)


def _floats_by_rows(source: TensorSource) -> Iterator[Floats]:
    """The values in FP32, some rows at a time."""
    width = source.shape[-1] if source.shape else 1
    row = byte_size(source.dtype, (width,))
    size = max(1, _VALUES_AT_ONCE // max(width, 1)) * row
    for raw in byte_blocks(source, size):
        shape = (len(raw) // row, width) if row else (0, width)
        yield decoded(source.dtype, raw).reshape(shape)
