"""The keys of a GGUF file: kept as the bytes that they are, decoded where a value is asked for.

A copy of a file repeats these bytes, so nothing is lost that a library would leave out (empty
texts and arrays) or write in another way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadConfig

# kind -> struct code
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
KIND_NAMES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array",
    "uint64", "int64", "float64",
)  # fmt: skip
UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Field:
    """One key: its name, its kind, and the bytes of its value."""

    name: str
    kind: int
    raw: bytes

    @property
    def item_kind(self) -> int | None:
        """The kind of an array's items, None for anything else."""
        return int(struct.unpack_from("<I", self.raw)[0]) if self.kind == ARRAY else None

    @property
    def value(self) -> Any:
        """As a Python value; bytes that are no UTF-8 survive in texts as surrogates."""
        if self.kind == STRING:
            return _text(self.raw, 0)[0]
        if self.kind != ARRAY:
            return struct.unpack(f"<{SCALARS[self.kind]}", self.raw)[0]
        kind, count = struct.unpack_from("<IQ", self.raw)
        if kind != STRING:
            return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.raw, 12))
        texts, at = [], 12
        for _ in range(count):
            text, at = _text(self.raw, at)
            texts.append(text)
        return texts

    @property
    def length(self) -> int | None:
        """Items of an array, None for anything else."""
        return int(struct.unpack_from("<Q", self.raw, 4)[0]) if self.kind == ARRAY else None

    def changed(self, value: Any) -> Field:
        """The same key with another value of the same kind."""
        return field(self.name, value, self.kind, self.item_kind)

    def encoded(self) -> bytes:
        """As it stands in a file."""
        return _packed(self.name) + struct.pack("<I", self.kind) + self.raw


def field(name: str, value: Any, kind: int, item_kind: int | None = None) -> Field:
    """A new key; BadConfig for a value that is none of its kind."""
    of = kind if item_kind is None else item_kind
    try:
        return _field(name, value, kind, item_kind)
    except (struct.error, AttributeError, TypeError, OverflowError, UnicodeEncodeError):
        raise BadConfig(
            f"the key {name} is {'an array of ' if kind == ARRAY else ''}{KIND_NAMES[of]} in the "
            f"file, which cannot hold {str(value)[:60]}. Convert the model again."
        ) from None


def _field(name: str, value: Any, kind: int, item_kind: int | None) -> Field:
    if kind == STRING:
        return Field(name, kind, _packed(value))
    if kind != ARRAY:
        return Field(name, kind, struct.pack(f"<{SCALARS[kind]}", value))
    assert item_kind is not None, "an array has items of a kind"
    head = struct.pack("<IQ", item_kind, len(value))
    if item_kind == STRING:
        return Field(name, kind, head + b"".join(_packed(item) for item in value))
    return Field(name, kind, head + struct.pack(f"<{len(value)}{SCALARS[item_kind]}", *value))


def _packed(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _text(raw: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", raw, at)
    end = at + 8 + length
    return raw[at + 8 : end].decode("utf-8", errors="surrogateescape"), end
