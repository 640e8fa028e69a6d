"""A drafter folder for MLX, as mlx-vlm's `split_mtp` makes it: unquantised, for Qwen-style heads.

Names lose `mtp.`, experts are stacked as `switch_mlp`, and norms are stored as 1 + w, which is
rounded to the dtype of the weights: small norms do not come back with every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.gguf.values import PLAIN, shifted
from headstart.checkpoint.provenance import made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource, concatenated, reshaped, rows
from headstart.checkpoint.writer import FolderPlan, Shard
from headstart.errors import ShapeMismatch, UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.experts import fused_slot
from headstart.families.registry import family, match_family
from headstart.heads.experts import fuse_experts, split_experts
from headstart.heads.formats import Export, count_modules
from headstart.heads.head import Head, dequantize

FILE = None
LOSES = "norms, which MLX keeps as 1 + w rounded to BF16; FP8 and INT8 weights, which become BF16"
# family -> the model_type of its drafters
_TYPES = {"qwen3_5": "qwen3_5_mtp", "qwen3_5_moe": "qwen3_5_mtp", "qwen3_next": "qwen3_5_mtp"}
# family -> whether embedding and LM head are one where its config does not say
_TIED = {"qwen3_5": True, "qwen3_5_moe": True, "qwen3_next": False}
_PREFIX = "mtp."
_STACKED, _ONE_BY_ONE = ".switch_mlp.", ".experts."
_BLOCK_SIZE = 2  # tokens of a round beside the drafts of one module


def why_not(owner: Family) -> str:
    return "" if owner.name in _TYPES else "no drafter folder of MLX for such heads is written here"


def plan(head: Head) -> Export:
    if reason := why_not(head.family):
        raise UnsupportedFamily(
            f"{head.family.name}: {reason}; expected one of {', '.join(_TYPES)}. Use --format "
            "headstart."
        )
    was_fused = len(split_experts(head.tensors)) != len(head.tensors)
    head = dequantize(head)
    naming = head.family.naming({}, "")
    tensors: dict[str, TensorSource] = {}
    for name, source in _stacked(split_experts(head.tensors)).items():
        published = head.family.keys.to_published(name, naming).removeprefix(_PREFIX)
        is_norm = name.endswith("norm.weight")
        tensors[published] = shifted(source, 1.0, source.dtype) if is_norm else source
    text = _text_config(head.config)
    config = {
        "model_type": _TYPES[head.family.name],
        "text_config": text,
        "block_size": head.num_modules + _BLOCK_SIZE,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", _TIED[head.family.name])),
    }
    details = {
        "format": "mlx", "family": head.family.name, "trunk_config": dict(head.config),
        "root": head.root, "experts": "fused" if was_fused else "per expert",
        "left_out": sorted(head.left_out), "lost_fields": list(head.lost_fields),
    }  # fmt: skip
    changes = (
        *head.changes, *head.config_notes(),
        "norms are stored as 1 + w, as MLX has them, and rounded to the weights' dtype",
    )  # fmt: skip
    shard = Shard(tensors, metadata={"format": "mlx"})
    plan = FolderPlan({"model.safetensors": shard}, head.side_files(), {"config.json": config})
    return Export(plan, changes, details)


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


def _stacked(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    result: dict[str, TensorSource] = {}
    stacks: dict[str, dict[int, TensorSource]] = {}
    for name, source in tensors.items():
        slot = fused_slot(name)
        if slot is None:
            result[name] = source
        else:
            stem = slot.name.rpartition(_ONE_BY_ONE)[0]
            stacks.setdefault(f"{stem}{_STACKED}{slot.projection}_proj.weight", {})[slot.expert] = (
                source
            )
    for name, parts in stacks.items():
        ordered = [parts[expert] for expert in sorted(parts)]
        result[name] = concatenated(ordered, (len(ordered), *ordered[0].shape))
    return result


def recognises(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.model_type in _TYPES.values()


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    owner = family(made.family) if made.family else _family(checkpoint)
    tensors = as_published(checkpoint, owner, dict.fromkeys(checkpoint.tensors, ""))
    if made.experts == "fused":
        tensors = fuse_experts(tensors)
    config = made.trunk_config or checkpoint.config.raw.get("text_config") or {}
    changes = ("norms went through 1 + w in the weights' dtype: small ones are rounded",)
    return Head(
        owner, tensors, config, checkpoint, made.root or owner.keys.roots[0],
        count_modules(tensors), left_out=made.left_out, lost_fields=made.lost_fields,
        changes=changes,
    )  # fmt: skip


def as_published(
    checkpoint: Checkpoint, owner: Family, names: Mapping[str, str], *, is_raw: bool = False
) -> dict[str, TensorSource]:
    """Tensors of MLX under our names; `names` are theirs, with the prefix before each's own.

    is_raw: norms are stored as they were published, without the one that MLX adds.
    """
    quantised = [name for name in names if name.endswith((".scales", ".biases"))]
    if quantised:
        raise UnsupportedFamily(
            f"{checkpoint.folder} has a head that MLX quantised ({some(quantised)}), which is not "
            "read here. Take one in BF16, or the head of the original model."
        )
    naming = owner.naming({}, "")
    tensors: dict[str, TensorSource] = {}
    for name, prefix in names.items():
        ours = owner.keys.to_ours(_PREFIX + name.removeprefix(prefix), naming)
        if ours is None:
            raise UnexpectedTensor(
                f"{checkpoint.folder} holds {name}, which is not part of a {owner.name} head. "
                "Remove it, or convert the head again."
            )
        tensors |= _unstacked(ours, checkpoint.source(name), is_raw)
    return tensors


def _unstacked(name: str, source: TensorSource, is_raw: bool) -> dict[str, TensorSource]:
    if name.endswith("norm.weight") and source.dtype in PLAIN and not is_raw:
        return {name: shifted(source, -1.0, source.dtype)}
    if _STACKED not in name:
        return {name: source}
    if len(source.shape) != 3:
        raise ShapeMismatch(f"{name} has shape {list(source.shape)}; expected a stack of matrices.")
    count, height, width = source.shape
    stem, _, rest = name.partition(_STACKED)
    flat = reshaped(source, (count * height, width))
    return {
        f"{stem}{_ONE_BY_ONE}{expert}.{rest}": rows(flat, expert * height, (expert + 1) * height)
        for expert in range(count)
    }


def _family(checkpoint: Checkpoint) -> Family:
    """By the text config that a drafter carries; its own model_type is that of three families."""
    text = checkpoint.config.raw.get("text_config")
    text = text if isinstance(text, dict) else {}
    found = match_family(text, [str(text.get("model_type", ""))], ())
    if found is None or found.name not in _TYPES:
        raise UnsupportedFamily(
            f"{checkpoint.folder}: text_config has model_type {text.get('model_type')!r}; expected "
            f"that of one of {', '.join(_TYPES)}."
        )
    return found
