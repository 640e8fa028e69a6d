"""One GGUF file: its header, checked, without reading its tensors.

The `gguf` package is not used for this: it follows whatever counts a file claims, and what it
writes is not key for key what it read. A file is accepted only if every text, array and tensor
lies inside it, and the tensors follow one another without gaps or overlaps, as llama.cpp asks.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from headstart.checkpoint.dtypes import GGUF_TYPES, byte_size
from headstart.checkpoint.gguf.fields import ARRAY, SCALARS, STRING, UINT32, Field
from headstart.checkpoint.header import TensorInfo, broken, short
from headstart.errors import BrokenFile

MAGIC = b"GGUF"
ALIGNMENT = 32  # where a file does not say
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 1 << 28
_MAX_NAME_BYTES, _MAX_DIMS, _MAX_ALIGNMENT = 1 << 16, 4, 1 << 16
_MAX_VALUES = 1 << 48
_LEAST_FIELD, _LEAST_TENSOR = 13, 32  # bytes that the shortest key and tensor take in a header
_NAMES = {number: name for name, (number, _, _) in GGUF_TYPES.items()}


@dataclass(frozen=True)
class GgufHeader:
    file: Path
    version: int
    fields: dict[str, Field]
    tensors: dict[str, TensorInfo]  # shapes as in torch, outermost first
    alignment: int


def is_gguf(path: Path) -> bool:
    """Whether a plain file begins as GGUF files do."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf_header(file: Path) -> GgufHeader:
    """Parse and check the header of `file`; BrokenFile says what is wrong with it."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # opening a pipe would wait for ever
            raise broken(file, "is not a plain file")
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size < 24:
                raise broken(file, f"has {size} bytes, too few for a GGUF header")
            length = min(size, _MAX_HEADER_BYTES)
            with mmap.mmap(handle.fileno(), length, access=mmap.ACCESS_READ) as data:
                return _Parser(file, data, size).header()
    except OSError as error:
        raise BrokenFile(
            f"{file} cannot be read ({error.strerror}). Check the file, or where the link points."
        ) from error


class _Parser:
    """Reads a header from its first byte on; everything is checked before it is used."""

    def __init__(self, file: Path, data: mmap.mmap, size: int):
        self.file, self.data, self.size, self.at = file, data, size, 0

    def header(self) -> GgufHeader:
        magic, version, num_tensors, num_fields = struct.unpack("<4sIQQ", self.take(24))
        if magic != MAGIC:
            raise self.broken(f"begins with {magic!r}; expected GGUF")
        if version not in _VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise self.broken(f"is a GGUF file of a kind that is not read here ({kind})")
        for count, least, what in (
            (num_fields, _LEAST_FIELD, "keys"), (num_tensors, _LEAST_TENSOR, "tensors"),
        ):  # fmt: skip
            if count * least > len(self.data):
                raise self.broken(f"claims {count} {what}, more than fit into it")
        fields: dict[str, Field] = {}
        for _ in range(num_fields):
            found = self.field()
            if found.name in fields:
                raise self.broken(f"has the key {short(found.name)} twice")
            fields[found.name] = found
        listed = [self.tensor() for _ in range(num_tensors)]
        alignment = self.alignment(fields)
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in self.placed(listed, start, alignment):
            if info.name in tensors:
                raise self.broken(f"has the tensor {short(info.name)} twice")
            tensors[info.name] = info
        return GgufHeader(self.file, version, fields, tensors, alignment)

    def field(self) -> Field:
        name = self.name("a key")
        (kind,) = struct.unpack("<I", self.take(4))
        start = self.at
        if kind == STRING:
            self.skip_text()
        elif kind == ARRAY:
            self.skip_array(name)
        elif kind in SCALARS:
            self.take(struct.calcsize(SCALARS[kind]))
        else:
            raise self.broken(f"gives the key {short(name)} the unknown kind {kind}")
        return Field(name, kind, self.data[start : self.at])

    def skip_array(self, name: str) -> None:
        kind, count = struct.unpack("<IQ", self.take(12))
        if kind == STRING:
            if 8 * count > len(self.data):
                raise self.broken(f"claims {count} texts in {short(name)}, more than fit into it")
            for _ in range(count):
                self.skip_text()
        elif kind in SCALARS:
            self.take(count * struct.calcsize(SCALARS[kind]))
        else:
            raise self.broken(f"has items of the kind {kind} in {short(name)}, which is not read")

    def tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self.name("a tensor")
        (num_dims,) = struct.unpack("<I", self.take(4))
        if num_dims > _MAX_DIMS:
            raise self.broken(f"gives {short(name)} {num_dims} dimensions; expected at most 4")
        *dims, number, offset = struct.unpack(f"<{num_dims}QIQ", self.take(8 * num_dims + 12))
        if number not in _NAMES:
            raise self.broken(
                f"stores {short(name)} as type {number}, which is none of the types known here",
                "Use the tools that wrote it.",
            )
        kind = _NAMES[number]
        shape = tuple(int(dim) for dim in reversed(dims))
        block = GGUF_TYPES[kind][1]
        if prod(shape) > _MAX_VALUES or 0 in shape or (shape and shape[-1] % block):
            raise self.broken(f"gives {short(name)} ({kind}) the shape {list(shape)}")
        return name, shape, kind, int(offset)

    def placed(
        self, listed: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
    ) -> Iterator[TensorInfo]:
        expected = 0
        for name, shape, kind, offset in listed:
            if offset != expected:
                raise self.broken(
                    f"has {short(name)} at offset {offset}, expected {expected}: tensors overlap "
                    "or leave a gap"
                )
            num_bytes = byte_size(kind, shape)
            end = start + offset + num_bytes
            if end > self.size:
                raise self.broken(f"is truncated: {self.size} bytes, {short(name)} ends at {end}")
            yield TensorInfo(name, kind, shape, self.file, end - num_bytes, end)
            expected += -(-num_bytes // alignment) * alignment
        if listed and self.size > start + expected:
            raise self.broken(f"has {self.size - start - expected} bytes after its last tensor")

    def alignment(self, fields: dict[str, Field]) -> int:
        found = fields.get("general.alignment")
        if found is None:
            return ALIGNMENT
        value = found.value
        if found.kind != UINT32 or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            raise self.broken(f"has general.alignment {short(value)}; expected a power of two")
        return int(value)

    def name(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        if not 0 < length < _MAX_NAME_BYTES:
            raise self.broken(f"has {what} whose name takes {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.broken(f"has {what} whose name is not UTF-8 text") from None

    def skip_text(self) -> None:
        (length,) = struct.unpack("<Q", self.take(8))
        self.take(length)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise self.broken(f"ends inside its header, or that is longer than {len(self.data):,}")
        found = self.data[self.at : end]
        self.at = end
        return found

    def broken(self, what: str, *advice: str) -> BrokenFile:
        return broken(self.file, what, *advice)
