"""openPangu-Ultra-MoE: the DeepSeek-V3 head with optional norms around the MLP."""

from __future__ import annotations

from headstart.families.base import Family, Part, Trunk, parts
from headstart.families.blocks import EXPERTS, MLA, NORMS, ROLES, SHARED_EXPERTS
from headstart.families.deepseek import LAYOUT, dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer

_OPTIONAL = parts("""
    mlp.gate.e_score_correction_bias   experts   if router_enable_expert_bias
    pre_mlp_layernorm.weight           hidden    if sandwich_norm
    post_mlp_layernorm.weight          hidden    if sandwich_norm
""")
_MOE_LAYER = NORMS + MLA + EXPERTS + SHARED_EXPERTS + _OPTIONAL


def _block(fields: Fields) -> tuple[Part, ...]:
    """The layer, where the config uses DeepSeek's field names; others are left to the trunk."""
    return _MOE_LAYER if fields.get("kv_lora_rank") and fields.get("n_routed_experts") else ()


FAMILY = Family(
    name="pangu_ultra_moe",
    title="openPangu-Ultra-MoE-718B",
    model_types=("pangu_ultra_moe",),
    architectures=("PanguUltraMoEForCausalLM",),
    keys=appended_layer(),
    layout=LAYOUT,
    head=ROLES,
    block=_block,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(kind_of=dense_then_moe),
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"vllm": "model.layers.{layer}."},
    served={"vllm": "0.11.1"},
    notes=("the number of published modules is not known; one is assumed",),
)
