"""A new GGUF file: keys and tensors in order, and the header that announces them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headstart.checkpoint.dtypes import GGUF_TYPES
from headstart.checkpoint.gguf.fields import Field
from headstart.checkpoint.gguf.header import ALIGNMENT, MAGIC, read_gguf_header
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.source import TensorSource

_VERSION = 3


@dataclass(frozen=True)
class GgufShard:
    """What a new file will hold; tensors follow one another in the order of the mapping."""

    tensors: Mapping[str, TensorSource]
    fields: tuple[Field, ...]
    alignment: int = ALIGNMENT
    version: int = _VERSION

    def header(self) -> bytes:
        """Everything before the first tensor, padded."""
        parts = [struct.pack("<4sIQQ", MAGIC, self.version, len(self.tensors), len(self.fields))]
        parts += [field.encoded() for field in self.fields]
        offset = 0
        for name, source in self.tensors.items():
            text, dims = name.encode(), tuple(reversed(source.shape))
            parts.append(struct.pack("<Q", len(text)) + text)
            kind = GGUF_TYPES[source.dtype][0]
            layout = f"<I{len(dims)}QIQ"
            parts.append(struct.pack(layout, len(dims), *dims, kind, offset))
            offset += padded(source.num_bytes, self.alignment)
        data = b"".join(parts)
        return data.ljust(padded(len(data), self.alignment), b"\0")

    def read_back(self, file: Path) -> dict[str, TensorInfo] | None:
        """The tensors that `file` holds; None if its keys are not those that were written."""
        found = read_gguf_header(file)
        return found.tensors if tuple(found.fields.values()) == self.fields else None


def padded(size: int, alignment: int) -> int:
    """`size` up to the next multiple."""
    return -(-size // alignment) * alignment
