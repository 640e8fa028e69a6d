"""Small safetensors files and folders for the tests of the checkpoint package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.source import TensorSource

CONFIG = {"model_type": "llama", "num_hidden_layers": 2}


def safetensors_bytes(
    tensors: dict[str, bytes], *, metadata: dict[str, str] | None = None
) -> bytes:
    """One-dimensional U8 tensors with the given content."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, data in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, end]}
        position = end
    return with_header(header, b"".join(tensors.values()))


def with_header(header: Any, data: bytes = b"") -> bytes:
    """A file with this header (JSON, or bytes as they are) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def make_folder(
    folder: Path, shards: dict[str, dict[str, bytes]], *, index: Any = None, config: Any = CONFIG
) -> Path:
    """A checkpoint of U8 tensors; `index` is a weight map, or True for the right one."""
    folder.mkdir(parents=True)
    for name, tensors in shards.items():
        (folder / name).write_bytes(safetensors_bytes(tensors))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if index is True:
        index = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    if index is not None:
        document = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(document)
    return folder


def computed(data: bytes, *, dtype: str = "U8") -> TensorSource:
    """A tensor made in memory."""
    return TensorSource(dtype, (len(data),), lambda: (data,), is_copy=False)


def info(file: Path, start: int, end: int, dtype: str = "U8") -> TensorInfo:
    assert byte_size(dtype, (end - start,)) == end - start
    return TensorInfo("t", dtype, (end - start,), file, start, end)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def leftovers(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if ".partial-" in path.name]
