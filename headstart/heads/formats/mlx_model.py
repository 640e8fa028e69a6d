"""A model in MLX's layout, and a head inside it: known by what its files say of themselves.

Heads lie there as `mtp.*` below one of several prefixes, in the model's shards or in a file beside
them (`mtp.safetensors`, `model-mtp.safetensors`). They are read; nothing is put into such a folder,
because releases of mlx-lm would take raw norms for their own and shift those of the trunk again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.errors import CheckpointError, HeadNotFound, UnsupportedFamily
from headstart.heads.detection import quoted, require_family
from headstart.heads.formats.mlx import as_published, recognises
from headstart.heads.formats.mlx_drafters import DRAFTERS
from headstart.heads.head import Head

if TYPE_CHECKING:
    from headstart.checkpoint.header import TensorInfo

_PREFIXES = ("language_model.mtp.", "model.mtp.", "mtp.")
_RUNTIME = "mtplx_runtime.json"
_RAW = "raw_hf_delta"


def is_mlx_model(checkpoint: Checkpoint) -> bool:
    """Whether MLX wrote the shards of a model; a drafter folder is a head alone."""
    marks = {metadata.get("format") for metadata in checkpoint.index.metadata.values()}
    return "mlx" in marks and not recognises(checkpoint)


def mlx_pitfalls(checkpoint: Checkpoint) -> Iterator[str]:
    """What to know of a model that MLX converted."""
    if is_mlx_model(checkpoint):
        yield (
            "MLX converted this model: names and norms of a head in it are MLX's own, so what is "
            "said of its head goes by the names of the original. `export` reads one that was kept"
        )


def refuse_mlx_model(model: Checkpoint) -> None:
    """CheckpointError for a target that MLX wrote."""
    if is_mlx_model(model):
        raise CheckpointError(
            f"{model.folder} is a model that MLX converted, with norms and experts stored in its "
            "own way; a head that is put in would be read wrongly, and some releases of mlx-lm "
            "would shift the trunk's norms. Make a drafter folder of the original instead: "
            f"headstart export ORIGINAL --format mlx --out {quoted(model.folder)}-mtp"
        )


def read_mlx_model(checkpoint: Checkpoint, model_type: str | None = None) -> Head:
    """The head inside a model that MLX converted, as it was published but for rounded norms."""
    owner = require_family(checkpoint, model_type)
    names = {
        name: prefix
        for name in checkpoint.tensors
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }
    if not names:
        raise HeadNotFound(
            f"{checkpoint.folder} has no head: converting to MLX drops it, whatever the config "
            "still declares. Take the original model."
        )
    if owner.name not in DRAFTERS:
        raise UnsupportedFamily(
            f"{checkpoint.folder}: how MLX stores heads of {owner.title} is not known here; "
            f"expected one of {', '.join(DRAFTERS)}. Take the original model."
        )
    is_raw = _is_raw(checkpoint, [checkpoint.info(name) for name in names])
    tensors = as_published(checkpoint, owner, names, is_raw=is_raw)
    how = "as published" if is_raw else "as 1 + w in the weights' dtype, so small ones are rounded"
    return Head(
        owner, tensors, checkpoint.config.raw, checkpoint, owner.keys.roots[0],
        model=os.path.abspath(checkpoint.folder), changes=(f"MLX stored its norms {how}",),
    )  # fmt: skip


def _is_raw(checkpoint: Checkpoint, infos: list[TensorInfo]) -> bool:
    """Whether norms lack the one that MLX adds: by a manifest, else by what they are around."""
    import torch

    manifest = checkpoint.folder / _RUNTIME
    if manifest.is_file():
        found = read_json_object(manifest).get("mtp_norm_layout")
        if found is not None:
            return bool(found == _RAW)
    norms = [info for info in infos if "norm" in info.name and len(info.shape) == 1]
    means = [load(checkpoint.source(info.name)).to(torch.float32).mean() for info in norms]
    return bool(means) and float(sum(means)) / len(means) < 0.5
