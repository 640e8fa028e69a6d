"""The demo's GGUF file: metadata as values, and tensors as float32 arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.values import dequantized
from headstart.errors import MissingTensor

if TYPE_CHECKING:
    from headstart.checkpoint.gguf.values import Floats


class GgufFile:
    """An opened file."""

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.path = path
        self.metadata = {name: field.value for name, field in header.fields.items()}
        self.tensors = header.tensors

    def values(self, name: str) -> Floats:
        """A tensor in float32."""
        import numpy as np

        if name not in self.tensors:
            raise MissingTensor(f"{self.path} has no {name}. Take the file of the package.")
        info = self.tensors[name]
        raw = np.fromfile(info.file, np.uint8, info.num_bytes, offset=info.start)
        return dequantized(info.dtype, raw).reshape(info.shape)
