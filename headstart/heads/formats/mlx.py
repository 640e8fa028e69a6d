"""A drafter folder for MLX, as mlx-vlm's `split_mtp` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.affine import Affine
from headstart.checkpoint.provenance import PROVENANCE_NAME, made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.writer import FolderPlan, Shard
from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.base import Family
from headstart.families.registry import family, match_family
from headstart.heads.experts import fuse_experts, has_fused_experts
from headstart.heads.formats import Export, count_modules
from headstart.heads.formats.mlx_drafters import DRAFTERS, is_drafter
from headstart.heads.formats.mlx_model import is_mlx_model, spelled_in_model
from headstart.heads.formats.mlx_spelling import (
    SpelledMlx,
    affine_of,
    requantized,
    spell_mlx,
    unspell_mlx,
    without_copies,
)
from headstart.heads.head import Head

FILE = None
LOSES = (
    "norms of Qwen (1 + w in BF16); FP8 and INT8 weights, which become BF16, and what --head-type "
    "quantises"
)
_ROUNDED = "norms are stored as 1 + w, as MLX has them, and rounded to the weights' dtype"


def why_not(owner: Family) -> str:
    known = owner.name in DRAFTERS
    return "" if known else "no drafter folder of MLX for such heads is written here"


def plan(head: Head, head_type: str | None = None) -> Export:
    if reason := why_not(head.family):
        raise UnsupportedFamily(
            f"{head.family.name}: {reason}; expected one of {', '.join(DRAFTERS)}. Use --format "
            "headstart."
        )
    drafter = DRAFTERS[head.family.name]
    head = without_copies(head)
    experts = "fused" if has_fused_experts(head.tensors) else "per expert"
    left_out = sorted(head.left_out)
    spelled = spelled_of(head, affine_of(head_type))
    text = _text_config(head.config)
    config = {
        "model_type": drafter.model_type,
        "text_config": text,
        "block_size": head.num_modules + drafter.block_size,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", drafter.is_tied)),
    }
    if spelled.is_quantized:
        config |= dict.fromkeys(("quantization", "quantization_config"), spelled.quantization)
    details = {
        "format": "mlx", "family": head.family.name, "trunk_config": dict(head.config),
        "root": head.root, "experts": experts, "left_out": left_out,
        "lost_fields": list(head.lost_fields),
    }  # fmt: skip
    rounded = [_ROUNDED] if drafter.shifts_norms else []
    changes = [*spelled.changes, *head.config_notes(), *rounded]
    shard = Shard(spelled.tensors, metadata={"format": "mlx"})
    folder = FolderPlan({"model.safetensors": shard}, head.side_files(), {"config.json": config})
    return Export(folder, tuple(changes), details)


def spelled_of(head: Head, how: Affine | None) -> SpelledMlx:
    """As MLX has it; a head that comes from MLX keeps its bytes."""
    found = None
    if is_drafter(head.origin):
        found = spelled_in_drafter(head.origin)
    elif is_mlx_model(head.origin):
        found = spelled_in_model(head.origin)
    if found is None or found.is_raw:
        return spell_mlx(head, how)
    return requantized(found, how)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part, with what the drafter's class needs and older configs spell otherwise."""
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, dict) else dict(config)
    share, width = text.get("partial_rotary_factor"), text.get("head_dim")
    if "rope_parameters" not in text and share is not None and width is not None:
        text["rope_parameters"] = {
            "type": "default",
            "rope_theta": text.get("rope_theta"),
            "partial_rotary_factor": share,
            "mrope_section": [int(width * share) // 2, 0, 0],
        }
        text.setdefault("norm_topk_prob", False)
    return text


def recognises(checkpoint: Checkpoint) -> bool:
    return is_drafter(checkpoint)


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    owner = family(made.family) if made.family else _family(checkpoint)
    if owner.name not in DRAFTERS:
        raise BadConfig(
            f"{checkpoint.folder / PROVENANCE_NAME}: family is {owner.name!r}; MLX has drafters of "
            f"{', '.join(DRAFTERS)}. Export the head again, or remove the file."
        )
    spelled = spelled_in_drafter(checkpoint)
    tensors, changes = unspell_mlx(spelled, owner, checkpoint.folder)
    if made.experts == "fused":
        tensors = fuse_experts(tensors)
    config = made.trunk_config or checkpoint.config.raw.get("text_config") or {}
    return Head(
        owner, tensors, config, checkpoint, made.root or owner.keys.roots[0],
        count_modules(tensors), left_out=made.left_out, lost_fields=made.lost_fields,
        changes=changes,
    )  # fmt: skip


def spelled_in_drafter(checkpoint: Checkpoint) -> SpelledMlx:
    """The head of a drafter folder, as it is stored there."""
    tensors = {name: checkpoint.source(name) for name in checkpoint.tensors}
    settings = checkpoint.config.raw.get("quantization")
    return SpelledMlx(tensors, settings if isinstance(settings, dict) else {})


def _family(checkpoint: Checkpoint) -> Family:
    """By the text config that a drafter carries; its own model_type is that of three families."""
    text = checkpoint.config.raw.get("text_config")
    text = text if isinstance(text, dict) else {}
    found = match_family(text, [str(text.get("model_type", ""))], ())
    if found is None or found.name not in DRAFTERS:
        raise UnsupportedFamily(
            f"{checkpoint.folder}: text_config has model_type {text.get('model_type')!r}; expected "
            f"that of one of {', '.join(DRAFTERS)}."
        )
    return found
