"""A checkpoint folder, opened: config, tensor table, and lazy access to tensors.

Opening reads JSON files and headers only. Tensors come as slices of files;
`checkpoint/values.py` loads them where values are needed. Symbolic links are followed, so
folders of a hub cache work as they are; what becomes part of a result is held to
`checkpoint/links.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headstart.checkpoint.config import Config, read_config, read_json_object
from headstart.checkpoint.config_fields import SAMPLING, check_kinds
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import INDEX_NAME, Index, read_index
from headstart.checkpoint.links import followed_links
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
            if path.suffix == ".gguf" and path.is_file():
                raise CheckpointError(
                    f"{path} is a GGUF file; expected a folder of safetensors. Commands about "
                    "heads and those that run a model take GGUF files; training, graft and "
                    "quantize do not."
                )
            if os.path.exists(path):
                raise CheckpointError(
                    f"{path} is not a folder; expected the folder of a checkpoint. Give the one "
                    "that holds config.json and the weights."
                )
            raise CheckpointError(
                f"{path} does not exist; expected the folder of a checkpoint. Check the path."
            )
        _check_kinds(path)
        return cls(path, read_config(path), read_index(path))

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.index.tensors

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        path = self.folder / "generation_config.json"
        found = read_json_object(path) if path.is_file() else {}
        check_kinds(path, found, SAMPLING)
        return found

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

    def tokenizer_documents(self) -> dict[str, Any]:
        """Files of a tokenizer that the model holds in itself, by name; of a folder: none."""
        return {}

    def remarks(self) -> tuple[str, ...]:
        """What to know about how the model is read, for people."""
        return ()

    def side_files(self) -> list[Path]:
        """Plain files beside the weights: tokenizer, templates, remote code, licence, ..."""
        return sorted(
            path
            for path in self.folder.iterdir()
            if path.is_file() and _is_side_file(path.name) and not _is_foreign(path.name)
        )

    def files_below(self) -> dict[str, Path]:
        """`side_files` and what lies in sub-folders, by name relative to the folder."""
        return {name: path for name, path in self._walk().items() if not _is_foreign(path.name)}

    def foreign_weights(self) -> list[str]:
        """Weights in other formats, which describe another head than a result has."""
        return [name for name, path in self._walk().items() if _is_foreign(path.name)]

    def links(self) -> dict[str, Path]:
        """Links among the files that a result may take from here; refused if they lead outside."""
        read = ["config.json", INDEX_NAME, "headstart.json", *self.index.metadata]
        present = [name for name in read if os.path.lexists(self.folder / name)]
        return followed_links(self.folder, [*present, *self.files_below()])

    def _walk(self) -> dict[str, Path]:
        """Files by relative name, links followed; hidden ones and our own are left out."""
        found: dict[str, Path] = {}
        for folder, folders, files in os.walk(self.folder, followlinks=True, onerror=_unreadable):
            here = Path(folder)
            folders[:] = [f for f in sorted(folders) if f[0] != "." and self._has_end(here / f)]
            for name in sorted(files):
                wanted = _is_side_file(name) if here == self.folder else name[0] != "."
                if wanted and (here / name).is_file():
                    found[(here / name).relative_to(self.folder).as_posix()] = here / name
        return found

    def _has_end(self, folder: Path) -> bool:
        """Whether a sub-folder is not a link to a folder that it lies in."""
        real = Path(os.path.realpath(folder))
        above = [p for p in folder.parents if p == self.folder or self.folder in p.parents]
        return not any(Path(os.path.realpath(p)).is_relative_to(real) for p in above)


def _check_kinds(folder: Path) -> None:
    """Refuse pipes and devices, for which a reader would wait, or which never end."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        _unreadable(error)
    for path in (folder / name for name in names):
        # A link to nothing is none of these: it is refused where it is needed.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(
                f"{path} is neither a file nor a folder; a checkpoint has nothing else. Remove it, "
                "or download the checkpoint again."
            )


def _is_side_file(name: str) -> bool:
    written_anew = ("config.json", INDEX_NAME, "headstart.json")
    return (
        name not in written_anew and not name.startswith(".") and not name.endswith(".safetensors")
    )


def _is_foreign(name: str) -> bool:
    """Pickled weights (and their index) and GGUF files."""
    return name.endswith((".bin", ".bin.index.json", ".pt", ".pth", ".gguf"))


def _unreadable(error: OSError) -> NoReturn:
    raise CheckpointError(
        f"{error.filename} cannot be listed ({error.strerror}); expected a folder that can be "
        "copied along. Change its permissions, or move it elsewhere."
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


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors dtype for one of torch."""
    own = str(dtype).removeprefix("torch.")
    return next(name for name, other in _TORCH_DTYPES.items() if other == own)
