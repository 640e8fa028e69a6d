"""A model in MLX's layout, and a head inside it: known by what its files say of themselves.

Heads lie there as `mtp.*` below one of several prefixes: in the model's shards or in a file beside
them (`mtp.safetensors`, `model-mtp.safetensors`, and vllm-mlx's `mtp/weights.safetensors`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.header import TensorInfo, read_header
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource, stored
from headstart.checkpoint.values import load
from headstart.errors import HeadNotFound, UnsupportedFamily
from headstart.heads.detection import quoted, require_family
from headstart.heads.formats.mlx_drafters import DRAFTERS, is_drafter
from headstart.heads.formats.mlx_spelling import SpelledMlx, unspell_mlx
from headstart.heads.head import Head, trunk_tensors

PREFIXES = ("language_model.mtp.", "model.mtp.", "mtp.")
SUB_FILE, SUB_MANIFEST = "mtp/weights.safetensors", "mtp/manifest.json"  # vllm-mlx's
GAMMA = {"artifact_schema_version": 1, "rmsnorm_weight_format": "mlx_gamma"}
_RUNTIME = "mtplx_runtime.json"
_RAW = "raw_hf_delta"
# mlx-lm adds 1 to all norms of a Qwen3.5 trunk where a name in model*.safetensors has this
TRAP_TYPES = ("qwen3_5", "qwen3_5_moe")
TRAP = (
    "mlx-lm 0.30.7 to 0.31.3 takes mtp.* in model*.safetensors for a sign that the trunk is not "
    "converted, and adds 1 to all its norms again: the model then writes nonsense"
)


def is_mlx_model(checkpoint: Checkpoint) -> bool:
    """Whether MLX wrote the shards of a model; a drafter folder is a head alone."""
    marks = {metadata.get("format") for metadata in checkpoint.index.metadata.values()}
    return "mlx" in marks and not is_drafter(checkpoint)


def head_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The head's tensors under the names that they have in their file."""
    found = {n: i for n, i in checkpoint.tensors.items() if n.startswith(PREFIXES)}
    beside = checkpoint.folder / SUB_FILE
    if found or not beside.is_file():
        return found
    return {n: i for n, i in read_header(beside).tensors.items() if n.startswith(PREFIXES)}


def spelled_in_model(checkpoint: Checkpoint) -> SpelledMlx:
    """The head inside a model of MLX, as it is stored there; without tensors where it has none."""
    infos = head_tensors(checkpoint)
    tensors: dict[str, TensorSource] = {}
    for name, info in infos.items():
        tensors[_below(name)] = stored(info)
    return SpelledMlx(tensors, _settings(checkpoint), _is_raw(checkpoint, infos))


def _below(name: str) -> str:
    return next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """How the head is quantised: by its own setting, else by the model's; paths as in the head."""
    config = checkpoint.config
    found = config.raw.get("mtplx_mtp_quantization") or config.get("quantization")
    if not isinstance(found, dict):
        return {}
    own = {_below(name): each for name, each in found.items() if name.startswith(PREFIXES)}
    return {**found, **own}


def read_mlx_model(checkpoint: Checkpoint, model_type: str | None = None) -> Head:
    """The head inside a model that MLX converted, as it was published but for rounded norms."""
    owner = require_family(checkpoint, model_type)
    spelled = spelled_in_model(checkpoint)
    if not spelled.tensors:
        raise HeadNotFound(
            f"{checkpoint.folder} has no head: converting to MLX drops it, whatever the config "
            f"still declares. Give it back: headstart restore {quoted(checkpoint.folder)} --from "
            "ORIGINAL --out DIR"
        )
    if owner.name not in DRAFTERS:
        raise UnsupportedFamily(
            f"{checkpoint.folder}: how MLX stores heads of {owner.title} is not known here; "
            f"expected one of {', '.join(DRAFTERS)}. Take the original model."
        )
    tensors, changes = unspell_mlx(spelled, owner, checkpoint.folder)
    return Head(
        owner, tensors, checkpoint.config.raw, checkpoint, owner.keys.roots[0],
        trunk_tensors=trunk_tensors(checkpoint, owner), model=os.path.abspath(checkpoint.folder),
        changes=changes,
    )  # fmt: skip


def _is_raw(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo]) -> bool:
    """Whether norms lack the one that MLX adds: by a manifest, else by what they are around."""
    import torch

    said = _document(checkpoint.folder / _RUNTIME).get("mtp_norm_layout")
    if said is not None:
        return bool(said == _RAW)
    manifest = _document(checkpoint.folder / SUB_MANIFEST)
    is_beside = any(info.file.parent != checkpoint.folder for info in infos.values())
    if is_beside and manifest.items() >= GAMMA.items():
        return False
    norms = [info for name, info in infos.items() if "norm" in name and len(info.shape) == 1]
    means = [load(stored(info)).to(torch.float32).mean() for info in norms]
    return bool(means) and float(sum(means)) / len(means) < 0.5


def _document(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
