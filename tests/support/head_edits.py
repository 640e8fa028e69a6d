"""What the head tests share: reading tensors with another library, and damaging checkpoints.

Results are read with the safetensors library, not with ours, so that a mistake in our reader cannot
hide one in our writer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.reader import Checkpoint
from headstart.heads.detection import find_head
from headstart.heads.export import plan_convert, plan_export
from headstart.heads.formats import open_head
from headstart.heads.graft import plan_graft
from headstart.heads.operation import Operation
from headstart.heads.stitch import plan_restore, plan_stitch

WITH_HEAD = [variant for variant in TINY_CONFIGS if variant not in ("llama", "qwen2")]
Tensors = dict[str, torch.Tensor]


def tensors(folder: Path) -> Tensors:
    """All tensors of a folder, by name."""
    result: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in result, f"{name} is stored twice"
            result[name] = tensor
    return result


def differing(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> set[str]:
    """Names whose dtype, shape or bytes differ, or that only one side has."""
    return {n for n in {*left, *right} if n not in left or n not in right} | {
        name for name in left.keys() & right.keys() if not identical(left[name], right[name])
    }


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    one, other = (side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right))
    return one.equal(other)


def config(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "config.json").read_text())
    assert isinstance(document, dict)
    return document


def head_names(folder: Path) -> dict[str, str]:
    """Our name -> published name of the head in `folder`."""
    return find_head(Checkpoint.open(folder)).tensors


def published(folder: Path, ours: str) -> str:
    """The published name of the first head tensor that ends with, else contains, `ours`."""
    names = head_names(folder)
    found = [n for k, n in names.items() if k.endswith((ours, f"{ours}.weight"))]
    return found[0] if found else next(name for key, name in names.items() if ours in key)


def edited(
    folder: Path,
    out: Path,
    *,
    change: Callable[[Tensors], None] = lambda tensors: None,
    change_config: Callable[[dict[str, Any]], Any] = lambda config: None,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a one-file checkpoint with other tensors, another config or more JSON files."""
    shutil.copytree(folder, out)
    contents = tensors(folder)
    change(contents)
    save_file(contents, out / "model.safetensors", metadata={"format": "pt"})
    document = config(folder)
    change_config(document)
    (out / "config.json").write_text(json.dumps(document))
    for name, value in (files or {}).items():
        (out / name).write_text(json.dumps(value))
    return out


def with_dense_head(folder: Path, out: Path) -> Path:
    """A DeepSeek-V3 checkpoint whose head has a dense MLP, as JoyAI-LLM-Flash does."""

    def change(contents: Tensors) -> None:
        prefix = "model.layers.3.mlp."
        for name in [n for n in contents if n.startswith(prefix)]:
            del contents[name]
        for kind in ("gate", "up", "down"):  # layer 0 is the dense one
            name = f"{kind}_proj.weight"
            contents[prefix + name] = contents[f"model.layers.0.mlp.{name}"] + 1

    return edited(folder, out, change=change)


def text_part(document: dict[str, Any]) -> dict[str, Any]:
    part = document.get("text_config", document)
    assert isinstance(part, dict)
    return part


def written(operation: Operation, out: Path) -> Path:
    """Carry out an operation; not waiting for the disk makes these tests many times faster."""
    with mock.patch.object(os, "fsync"):
        operation.write(out)
    return out


def export(model: Path, format_name: str, out: Path, **options: Any) -> Path:
    return written(plan_export(open_head(model), format_name, **options), out)


def convert(head: Path, format_name: str, out: Path, model: Path | None = None) -> Path:
    lender = Checkpoint.open(model) if model else None
    return written(plan_convert(open_head(head), format_name, model=lender), out)


def stitch(head: Path, model: Path, out: Path, **options: Any) -> Path:
    return written(plan_stitch(open_head(head), Checkpoint.open(model), **options), out)


def restore(model: Path, original: Path, out: Path, **options: Any) -> Path:
    head = open_head(original)
    return written(plan_restore(Checkpoint.open(model), head.origin, head, **options), out)


def graft(model: Path, out: Path) -> Path:
    return written(plan_graft(Checkpoint.open(model)), out)
