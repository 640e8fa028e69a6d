"""A drafter folder for MLX, unquantised, as mlx-vlm's `split_mtp` makes it.

Experts are stacked as `switch_mlp`. Norms of Qwen are stored as 1 + w, which is rounded to the
dtype of the weights: small ones do not come back with every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.gguf.values import PLAIN, cast, shifted
from headstart.checkpoint.provenance import PROVENANCE_NAME, made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, Shard
from headstart.errors import BadConfig, MissingTensor, UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.registry import family, match_family
from headstart.heads.experts import (
    fuse_experts,
    has_fused_experts,
    stack_experts,
    unstack_experts,
)
from headstart.heads.formats import Export, count_modules
from headstart.heads.formats.mlx_drafters import DRAFTERS, KEYS, VALUES, Drafter
from headstart.heads.head import Head, config_fields, dequantize
from headstart.heads.latent import joined_kv_b, split_kv_b

FILE = None
LOSES = "norms of Qwen (1 + w, rounded to BF16); FP8 and INT8 weights, which become BF16"
_ROUNDED = "norms are stored as 1 + w, as MLX has them, and rounded to the weights' dtype"


def why_not(owner: Family) -> str:
    known = owner.name in DRAFTERS
    return "" if known else "no drafter folder of MLX for such heads is written here"


def plan(head: Head) -> Export:
    if reason := why_not(head.family):
        raise UnsupportedFamily(
            f"{head.family.name}: {reason}; expected one of {', '.join(DRAFTERS)}. Use --format "
            "headstart."
        )
    drafter = DRAFTERS[head.family.name]
    experts = "fused" if has_fused_experts(head.tensors) else "per expert"
    head = dequantize(head)
    left_out = sorted(head.left_out)
    tensors = _theirs(head, drafter)
    text = _text_config(head.config)
    config = {
        "model_type": drafter.model_type,
        "text_config": text,
        "block_size": head.num_modules + drafter.block_size,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", drafter.is_tied)),
    }
    details = {
        "format": "mlx", "family": head.family.name, "trunk_config": dict(head.config),
        "root": head.root, "experts": experts, "left_out": left_out,
        "lost_fields": list(head.lost_fields),
    }  # fmt: skip
    changes = [*head.changes, *head.config_notes(), *([_ROUNDED] if drafter.shifts_norms else [])]
    shard = Shard(tensors, metadata={"format": "mlx"})
    folder = FolderPlan({"model.safetensors": shard}, head.side_files(), {"config.json": config})
    return Export(folder, tuple(changes), details)


def _theirs(head: Head, drafter: Drafter) -> dict[str, TensorSource]:
    tensors = {**head.tensors, **(_tables(head) if drafter.has_tables else {})}
    result: dict[str, TensorSource] = {}
    for name, source in stack_experts(tensors).items():
        theirs = drafter.theirs(name)
        if theirs is None:
            raise UnexpectedTensor(
                f"the head holds {name}, for which MLX's drafter has no place. Remove it, or use "
                "--format headstart."
            )
        if name == drafter.kv_b:
            fields = head.family.fields_of_head(config_fields(head.config))
            stem = theirs.removesuffix("kv_b_proj.weight")
            result[stem + KEYS], result[stem + VALUES] = split_kv_b(name, source, fields)
        elif drafter.shifts_norms and name.endswith("norm.weight"):
            result[theirs] = shifted(source, 1.0, source.dtype)
        else:
            result[theirs] = cast(source, "F32") if name.endswith(drafter.in_fp32) else source
    return result


def _tables(head: Head) -> dict[str, TensorSource]:
    """Embedding and LM head: the head's own, else those of the trunk."""
    trunk = {"embed_tokens": head.family.trunk.embed, "lm_head": head.family.trunk.lm_heads[0]}
    found: dict[str, TensorSource] = {}
    for role, ending in trunk.items():
        own = f"modules.0.{role}.weight"
        lent = [s for name, s in head.trunk_tensors.items() if name.endswith(ending)]
        if own not in head.tensors and not lent and role == "embed_tokens":
            raise MissingTensor(
                f"MLX's drafter of {head.family.title} holds the embedding, which is not at hand. "
                "Export from the whole model, or add --model MODEL."
            )
        if own not in head.tensors and lent:
            found[own] = lent[0]
    return found


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
    types = {drafter.model_type for drafter in DRAFTERS.values()}
    return checkpoint.config.model_type in types


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    owner = family(made.family) if made.family else _family(checkpoint)
    if owner.name not in DRAFTERS:
        raise BadConfig(
            f"{checkpoint.folder / PROVENANCE_NAME}: family is {owner.name!r}; MLX has drafters of "
            f"{', '.join(DRAFTERS)}. Export the head again, or remove the file."
        )
    drafter = DRAFTERS[owner.name]
    tensors = as_published(checkpoint, owner, dict.fromkeys(checkpoint.tensors, ""))
    if made.experts == "fused":
        tensors = fuse_experts(tensors)
    config = made.trunk_config or checkpoint.config.raw.get("text_config") or {}
    return Head(
        owner, tensors, config, checkpoint, made.root or owner.keys.roots[0],
        count_modules(tensors), left_out=made.left_out, lost_fields=made.lost_fields,
        changes=("norms went through 1 + w in the weights' dtype: small ones are rounded",)
        if drafter.shifts_norms else (),
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
    drafter = DRAFTERS[owner.name]
    tensors: dict[str, TensorSource] = {}
    for name, prefix in names.items():
        ours = drafter.ours(name.removeprefix(prefix))
        if ours is None:
            raise UnexpectedTensor(
                f"{checkpoint.folder} holds {name}, which is not part of a {owner.name} head. "
                "Remove it, or convert the head again."
            )
        source = checkpoint.source(name)
        is_shifted = drafter.shifts_norms and not is_raw and source.dtype in PLAIN
        if is_shifted and ours.endswith("norm.weight"):
            source = shifted(source, -1.0, source.dtype)
        tensors[ours] = source
    if drafter.kv_b:
        stem = drafter.kv_b.removesuffix("kv_b_proj.weight")
        parts = [tensors.pop(stem + each, None) for each in (KEYS, VALUES)]
        if parts[0] is None or parts[1] is None:
            raise MissingTensor(f"{checkpoint.folder} lacks {KEYS} or {VALUES}. Make it again.")
        tensors[drafter.kv_b] = joined_kv_b(parts[0], parts[1])
    return unstack_experts(tensors)


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
