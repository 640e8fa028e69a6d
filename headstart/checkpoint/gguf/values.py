"""Values of GGUF tensors: cast, quantised, dequantised and rearranged, a few rows at a time.

By numpy alone: importing torch takes longer than copying a gigabyte, and a head has few values
that are not copied. F32, F16, BF16, Q8_0 and Q4_1 are read here, so that the demo needs nothing
installed; all other block types, and quantising, are left to the `gguf` package (extra `gguf`);
K-quants are made by llama.cpp's own tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.dtypes import DTYPE_BITS, byte_size
from headstart.checkpoint.gguf.quantize_tool import TYPES, quantized_by_tool
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.errors import MissingExtra, ShapeMismatch, UnsupportedFamily, install

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

PLAIN = ("F32", "F16", "BF16")
# what the package can make of floats
QUANTIZED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "TQ2_0", "TQ1_0", "MXFP4")
# what neither we nor the package can read
UNREADABLE = ("Q1_0", "Q2_0")
_VALUES_AT_ONCE = _BYTES_AT_ONCE = 1 << 20
_BLOCK = 32  # weights that share a scale in Q8_0 and Q4_1


def cast(source: TensorSource, kind: str) -> TensorSource:
    """The same values as another type, rounded to nearest; the source itself where it has it."""
    if source.dtype == kind:
        return source
    if kind in TYPES and source.dtype in PLAIN:
        return quantized_by_tool(source, kind)
    if kind in TYPES:  # the tool does not read what is quantised already
        return quantized_by_tool(cast(source, "F32"), kind)
    _check(source.dtype, kind)
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


def _check(source: str, kind: str) -> None:
    """Before anything is written: can this be read, and that be made?"""
    if source in UNREADABLE or (source not in DTYPE_BITS and kind not in PLAIN):
        raise UnsupportedFamily(
            f"tensors of type {source} cannot be turned into {kind} here; keep their type, or take "
            "the head from the original safetensors."
        )
    if kind not in (*PLAIN, *QUANTIZED):
        raise UnsupportedFamily(
            f"tensors cannot be quantised to {kind} here; expected one of "
            f"{', '.join([*PLAIN, *QUANTIZED]).lower()}. llama-quantize makes the others."
        )
    if kind in QUANTIZED or source not in (*DTYPE_BITS, "Q8_0", "Q4_1"):
        _quants()


def require_readable(kind: str) -> None:
    """UnsupportedFamily or MissingExtra for a type whose values cannot be read here."""
    if kind in UNREADABLE:
        raise UnsupportedFamily(
            f"tensors of type {kind} cannot be dequantised here; the engine that such files are "
            "made for runs them (`headstart launch FILE.gguf --engine llamacpp`)."
        )
    if kind not in _OWN:
        _quants()


def _quants() -> Any:
    try:
        from gguf import quants
    except ImportError:
        raise MissingExtra(
            f"quantised GGUF tensors need the package gguf; {install('gguf')}."
        ) from None
    return quants


def decoded(dtype: str, raw: bytes) -> Floats:
    """Values of whole rows in FP32, flat."""
    import numpy as np

    if dtype == "BF16":
        bits = np.frombuffer(raw, "<u2").astype("<u4") << 16
        return bits.view("<f4")
    if dtype in DTYPE_BITS and dtype not in _OWN:  # FP8, integers
        from headstart.checkpoint.values import load, to_float32

        count = len(raw) * 8 // DTYPE_BITS[dtype]
        source = TensorSource(dtype, (count,), lambda: (raw,), is_copy=False)
        return np.asarray(to_float32(load(source)))
    return dequantized(dtype, np.frombuffer(raw, np.uint8))


def dequantized(kind: str, raw: Bytes) -> Floats:
    """The values of whole blocks, flat."""
    if kind in _OWN:
        return _OWN[kind](raw)
    from gguf import GGMLQuantizationType

    values: Floats = _quants().dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind])
    return values.reshape(-1)


def encoded(values: Floats, kind: str) -> memoryview:
    """The bytes of values in a type, rounded to nearest."""
    import numpy as np

    values = np.ascontiguousarray(values, "<f4")
    if kind == "BF16":
        return _bf16(values).reshape(-1).data.cast("B")
    if kind in PLAIN:
        with np.errstate(over="ignore"):  # what F16 has no room for becomes infinite
            made = values.astype("<f2") if kind == "F16" else values
        return made.reshape(-1).data.cast("B")
    from gguf import GGMLQuantizationType

    return memoryview(_quants().quantize(values, GGMLQuantizationType[kind]).reshape(-1).data)


def _bf16(values: Floats) -> NDArray[np.uint16]:
    """The upper halves of the bits, rounded to nearest, ties to even."""
    import numpy as np

    bits = values.view("<u4")
    found: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    found[np.isnan(values)] = 0x7FC0
    return found


def _floats(raw: Bytes) -> Floats:
    values: Floats = raw.view("<f4").copy()
    return values


def _halves(raw: Bytes) -> Floats:
    values: Floats = raw.view("<f2").astype("<f4")
    return values


def _q8_0(raw: Bytes) -> Floats:
    """Blocks of a scale (fp16) and 32 signed bytes."""
    blocks = raw.reshape(-1, 2 + _BLOCK)
    numbers: Floats = blocks[:, 2:].view("i1").astype("<f4")
    values: Floats = _halves(blocks[:, :2].copy()) * numbers
    return values.reshape(-1)


def _q4_1(raw: Bytes) -> Floats:
    """Blocks of a scale and a minimum (fp16) and 16 bytes: low nibbles first, then high ones."""
    import numpy as np

    blocks = raw.reshape(-1, 4 + _BLOCK // 2)
    scales = _halves(blocks[:, :4].copy())
    packed = blocks[:, 4:]
    numbers: Floats = np.concatenate([packed & 15, packed >> 4], axis=1).astype("<f4")
    values: Floats = numbers * scales[:, :1] + scales[:, 1:]
    return values.reshape(-1)


_OWN = {"F32": _floats, "F16": _halves, "Q8_0": _q8_0, "Q4_1": _q4_1}
