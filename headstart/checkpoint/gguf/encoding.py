"""Numbers as GGUF stores them, to floats and back.

F32, F16, BF16, Q8_0 and Q4_1 are read here, by numpy alone, so that the demo needs nothing
installed; all other block types, and quantising, are left to the `gguf` package (extra `gguf`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headstart.checkpoint.dtypes import DTYPE_BITS
from headstart.checkpoint.source import TensorSource
from headstart.errors import MissingExtra, UnsupportedFamily, install

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
_BLOCK = 32  # weights that share a scale in Q8_0 and Q4_1


def require_castable(source: str, kind: str) -> None:
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
