"""A checkpoint folder, opened: config, tensor table, and lazy access to tensors.

Opening reads JSON files and headers only. Tensors come as slices of files;
`checkpoint/values.py` loads them where values are needed. Symbolic links are followed, so
folders of a hub cache work as they are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.config import Config, read_config, read_json_object
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import Index, read_index
from headstart.checkpoint.source import TensorSource, stored
from headstart.errors import CheckpointError, MissingTensor, some

if TYPE_CHECKING:
    import torch

_TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16",
    "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """One folder of config and safetensors files."""

    folder: Path
    config: Config
    index: Index

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read and check everything but the tensors themselves."""
        path = Path(folder)
        if not os.path.isdir(path):
            kind = "is not a folder" if os.path.exists(path) else "does not exist"
            raise CheckpointError(f"{path} {kind}; expected the folder of a checkpoint.")
        return cls(path, read_config(path), read_index(path))

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.index.tensors

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        path = self.folder / "generation_config.json"
        return read_json_object(path) if path.is_file() else {}

    def info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            module = name.rpartition(".")[0].rpartition(".")[2]
            near = [n for n in self.tensors if module and module in n.split(".")]
            hint = f" Near names: {some(near)}." if near else ""
            raise MissingTensor(f"{self.folder} has no tensor {name!r}.{hint}") from None

    def source(self, name: str) -> TensorSource:
        return stored(self.info(name))

    def side_files(self) -> list[Path]:
        """Plain files beside the weights: tokenizer, templates, remote code, licence, ..."""
        skip = {"config.json", "model.safetensors.index.json", "headstart.json"}
        return sorted(
            path
            for path in self.folder.iterdir()
            if path.is_file()
            and path.name not in skip
            and path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
            and not path.name.endswith(".bin.index.json")  # of the pickled weights left behind
            and not path.name.startswith(".")
        )


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a safetensors dtype; CheckpointError if torch has none."""
    import torch

    if name not in _TORCH_DTYPES:
        raise CheckpointError(
            f"tensors of dtype {name} cannot be held by torch; carry them as they are "
            "(leave out --dequantize)."
        )
    dtype = getattr(torch, _TORCH_DTYPES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype
