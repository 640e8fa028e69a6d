"""One safetensors file: its header, checked, without reading its tensors.

The format is eight bytes of header length, a JSON header, then the data. A file is accepted only if
every tensor lies inside it, has the size its dtype and shape ask for, and the tensors tile the data
without gaps or overlaps. Nothing here knows about models.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from headstart.checkpoint.dtypes import DTYPE_BITS, byte_size
from headstart.errors import BrokenFile

# The format's own limit; a larger value means the first eight bytes are not a header length.
MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 64


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes [start, end) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """Parse and check the header of `file`; BrokenFile says what is wrong with it."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # opening a pipe would wait for ever
            raise broken(file, "is not a plain file")
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            raw_length = handle.read(8)
            if len(raw_length) < 8:
                raise broken(file, f"has {size} bytes, too few for a safetensors header")
            (length,) = struct.unpack("<Q", raw_length)
            if length > MAX_HEADER_BYTES:
                raise broken(
                    file, f"claims a header of {length} bytes (limit {MAX_HEADER_BYTES:,})"
                )
            if 8 + length > size:
                raise broken(
                    file, f"ends inside its header ({size} bytes, header needs {8 + length})"
                )
            raw = handle.read(length)
    except OSError as error:
        raise BrokenFile(
            f"{file} cannot be read ({error.strerror}). Check the file, or where the link points."
        ) from error
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique(file))
    except (ValueError, RecursionError) as error:
        raise broken(file, f"has a header that is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise broken(file, "has a header that is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise broken(file, "has __metadata__ that is not a JSON object")
    for text in (*entries, *metadata, *map(str, metadata.values())):
        if not text.isascii() and not _is_unicode(text):
            raise broken(file, f"has a name that is not Unicode text ({short(text)})")
    data_start = 8 + length
    tensors = {name: _tensor(file, name, entry, data_start) for name, entry in entries.items()}
    _check_tiling(file, tensors, data_start, size)
    return Header(tensors, {str(k): str(v) for k, v in metadata.items()})


def _unique(file: Path) -> Any:
    """A JSON hook that refuses a name given twice: the two places cannot both be right."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise broken(file, f"names {short(twice)} twice in its header")
        return result

    return build


def _tensor(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise broken(file, f"describes {short(name)} with something that is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise broken(file, f"gives {short(name)} the unknown dtype {short(dtype)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise broken(
            file, f"gives {short(name)} shape {short(shape)} and data_offsets {short(offsets)}"
        )
    start, end = offsets
    if start > end or end - start != byte_size(dtype, tuple(shape)):
        needed = byte_size(dtype, tuple(shape))
        raise broken(
            file,
            f"gives {short(name)} {end - start} bytes; {dtype} {short(shape)} needs "
            f"{short(needed)}",
        )
    return TensorInfo(name, dtype, tuple(shape), file, data_start + start, data_start + end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_RANK
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _check_tiling(file: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    previous = "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start < position:
            raise broken(file, f"has {short(info.name)} overlapping {short(previous)}")
        if info.start > position:
            raise broken(
                file, f"has {info.start - position} unused bytes before {short(info.name)} (a gap)"
            )
        position, previous = info.end, info.name
    if position > size:
        raise broken(file, f"is truncated: {size} bytes on disk, {position} expected")
    if position < size:
        raise broken(file, f"has {size - position} bytes after its last tensor")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
        return False
    return True


def short(value: object) -> str:
    """A value on one line of bounded length, whatever a broken file holds."""
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:100]}..."


def broken(file: Path, what: str, advice: str = "Download or copy the file again.") -> BrokenFile:
    """The error for a file that is not what it should be."""
    return BrokenFile(f"{file} {what}. {advice}")
