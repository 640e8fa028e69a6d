"""Mellum 2: a Qwen-style head with plain norms, whose attention slides, on a MoE trunk."""

from __future__ import annotations

from typing import Any

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.families.base import Family, HeadLayout, Part, Trunk
from headstart.families.blocks import DENSE_MLP, EXPERTS, GQA, NORMS, QK_NORM, ROLES
from headstart.families.dims import Fields
from headstart.families.keymaps import qwen_style
from headstart.families.runtime import Runtime

_SPARSE = NORMS + GQA + QK_NORM + EXPERTS
_DENSE = NORMS + GQA + QK_NORM + DENSE_MLP


def _kind(fields: Fields, layer: int) -> str:
    kinds = fields.get("mlp_layer_types")
    is_dense = isinstance(kinds, list) and kinds[layer : layer + 1] == ["dense"]
    return "dense" if is_dense else "sparse"


def _block(fields: Fields) -> tuple[Part, ...]:
    kinds = fields.get("mtp_mlp_layer_types")
    return _DENSE if isinstance(kinds, list) and kinds[:1] == ["dense"] else _SPARSE


_KINDS = ("full_attention", "sliding_attention")
# of a config that does not say
_ROTATIONS: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def _attention(fields: Fields, layer: int) -> str:
    """What a layer attends to; the head's block is the one after the last."""
    count = int(fields.get("num_hidden_layers") or 0)
    own, name = (layer, "layer_types") if layer < count else (0, "mtp_layer_types")
    kinds = fields.get(name)
    if isinstance(kinds, list) and own < len(kinds):
        return str(kinds[own])
    return _KINDS[layer >= count]


def _normalised(fields: Fields) -> Fields:
    """Angles are given by kind of layer; sliding layers have the geometry of the others."""
    count = int(fields.get("num_hidden_layers") or 0)
    listed = fields.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or len(listed) != count):
        found = len(listed) if isinstance(listed, list) else repr(listed)
        raise BadConfig(
            f"layer_types has {found} entries; expected one for each of {count} layers."
        )
    kinds = {_attention(fields, layer) for layer in range(count + 1)}
    if unknown := sorted(kinds - set(_KINDS)):
        raise UnsupportedFamily(
            f"layer_types or mtp_layer_types holds {some(unknown)}; the engine computes "
            f"{' and '.join(_KINDS)} for mellum."
        )
    window = fields.get("sliding_window")
    if "sliding_attention" in kinds and (type(window) is not int or window < 1):
        raise BadConfig(
            f"layers slide and sliding_window is {window!r}; expected a whole number above 0. "
            "Take the config.json of the model's release."
        )
    given = fields.get("rope_parameters") or {}
    missing = sorted(kinds - set(given)) if given else []
    if missing:
        raise BadConfig(
            f"rope_parameters has no entry for {some(missing)}, which layers are. Take the "
            "config.json of the model's release."
        )
    rotations = {**_ROTATIONS, **given}
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    return {
        "rope_parameters": rotations["full_attention"],
        "swa_rope_parameters": rotations["sliding_attention"],
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": kv_heads or heads,
        "swa_head_dim": fields.get("head_dim"),
        "swa_v_head_dim": fields.get("head_dim"),
        "swa_window": window,
    }


FAMILY = Family(
    name="mellum",
    title="Mellum 2, 2.1 (12B-A2.5B)",
    model_types=("mellum",),
    architectures=("MellumForCausalLM",),
    keys=qwen_style(),
    layout=HeadLayout(),
    head=ROLES,
    block=_block,
    block_kind="sparse",
    trunk=Trunk(
        kinds={"sparse": _SPARSE, "dense": _DENSE},
        kind_of=_kind,
        slides=lambda fields, layer: _attention(fields, layer) == "sliding_attention",
    ),
    looked_up_as={"vllm": "mtp.layers.{module}.", "sglang": "mtp.layers.{module}."},
    elsewhere=("transformers 5.22.2 with generate(use_mtp=True)",),
    is_complete=True,
    runtime=Runtime(
        defaults={"use_qk_norm": True, "head_dim": 128, "sliding_window": 1024},
        normalise=_normalised,
        output_bias=True,
    ),
    notes=(
        "one module at most; its attention is of mtp_layer_types, sliding where that is not given",
        "experts are stored one by one or fused; either is kept",
        "which of the releases carry the head is not known",
        "vLLM 0.33.0 drafts through its transformers backend where a config says num_mtp_layers, "
        "as its sources read; not run here",
    ),
)
