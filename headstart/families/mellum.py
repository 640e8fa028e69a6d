"""Mellum 2: a Qwen-style head with plain norms, whose attention slides, on a MoE trunk."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Part, Trunk
from headstart.families.blocks import DENSE_MLP, EXPERTS, GQA, NORMS, QK_NORM, ROLES
from headstart.families.dims import Fields
from headstart.families.keymaps import qwen_style

_SPARSE = NORMS + GQA + QK_NORM + EXPERTS
_DENSE = NORMS + GQA + QK_NORM + DENSE_MLP


def _kind(fields: Fields, layer: int) -> str:
    kinds = fields.get("mlp_layer_types")
    is_dense = isinstance(kinds, list) and kinds[layer : layer + 1] == ["dense"]
    return "dense" if is_dense else "sparse"


def _block(fields: Fields) -> tuple[Part, ...]:
    kinds = fields.get("mtp_mlp_layer_types")
    return _DENSE if isinstance(kinds, list) and kinds[:1] == ["dense"] else _SPARSE


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
    trunk=Trunk(kinds={"sparse": _SPARSE, "dense": _DENSE}, kind_of=_kind),
    looked_up_as={"vllm": "mtp.layers.{module}.", "sglang": "mtp.layers.{module}."},
    elsewhere=("transformers 5.22.2 with generate(use_mtp=True)",),
    is_complete=True,
    lacks="rotary angles by kind of layer, and a head whose window is not the trunk's last layer's",
    notes=(
        "one module at most; its attention is of mtp_layer_types, sliding where that is not given",
        "experts are stored one by one or fused; either is kept",
        "which of the releases carry the head is not known",
    ),
)
