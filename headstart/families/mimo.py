"""MiMo-7B (also what Llama and Qwen2 trunks become when a head is grafted) and MiMo-V2."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, GQA, NORMS, QKV_BIAS, ROLES
from headstart.families.dims import Fields
from headstart.families.keymaps import mtp_layers

_LAYER = NORMS + GQA + QKV_BIAS + DENSE_MLP

MIMO = Family(
    name="mimo",
    title="MiMo-7B Base, SFT, RL",
    model_types=("mimo",),
    architectures=("MiMoForCausalLM",),
    keys=mtp_layers(
        "model.mtp_layers.",
        embed_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fuse="input_proj",
    ),
    layout=HeadLayout(
        fuse_order="hidden_first",
        zero_embed_at_position_0=True,
        deviations={"vllm": {"trunk_hidden": "before_final_norm"}},
    ),
    head=ROLES,
    block=lambda fields: _LAYER,
    block_kind="dense",
    trunk=Trunk(kinds={"dense": _LAYER}),
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": ""},
    is_complete=True,
)

_SWA = parts("""
    self_attn.q_proj.weight              swa_heads*swa_head_dim      hidden
    self_attn.k_proj.weight              swa_kv_heads*swa_head_dim   hidden
    self_attn.v_proj.weight              swa_kv_heads*swa_v_dim      hidden
    self_attn.o_proj.weight              hidden                      swa_heads*swa_v_dim
    self_attn.attention_sink_bias        swa_heads                   if add_swa_attention_sink_bias
""")
_FULL_MOE = NORMS + GQA + EXPERTS + parts("mlp.gate.e_score_correction_bias experts")
_SWA_MOE = NORMS + _SWA + EXPERTS + parts("mlp.gate.e_score_correction_bias experts")
_V2_BLOCK = (
    _SWA
    + DENSE_MLP
    + parts("""
    input_layernorm.weight     hidden
    pre_mlp_layernorm.weight   hidden
""")
)


def _v2_kind(fields: Fields, layer: int) -> str:
    pattern, moe = fields.get("hybrid_layer_pattern"), fields.get("moe_layer_freq")
    attention = "swa" if isinstance(pattern, list) and pattern[layer] == 1 else "full"
    return f"{attention}_{'moe' if isinstance(moe, list) and moe[layer] else 'dense'}"


V2 = Family(
    name="mimo_v2",
    title="MiMo-V2-Flash, V2-Pro, V2.5, V2.5-Pro, V2.5-Omni",
    model_types=("mimo_v2_flash", "mimo_v2", "mimo_v2_omni"),
    architectures=(
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2OmniForCausalLM",
    ),
    count_field=None,
    default_modules=3,
    keys=mtp_layers("model.mtp.layers."),
    layout=HeadLayout(
        topology="parallel",
        deviations={"vllm": {"topology": "recursive"}},  # runs module 0 for every depth
    ),
    head=ROLES,
    block=lambda fields: _V2_BLOCK,
    trunk=Trunk(
        kinds={
            "full_dense": NORMS + GQA + DENSE_MLP,
            "swa_dense": NORMS + _SWA + DENSE_MLP,
            "full_moe": _FULL_MOE,
            "swa_moe": _SWA_MOE,
        },
        kind_of=_v2_kind,
    ),
    kv_elements="swa_kv_heads*swa_head_dim+swa_kv_heads*swa_v_dim",
    looked_up_as={"vllm": "model.mtp.layers.{module}.", "sglang": "model.decoder."},
    is_complete=True,
    notes=(
        "V2.5-Pro stores a fused qkv_proj, pre-sharded for eight ranks: copied as it is",
        "vLLM uses the first of the three modules only",
    ),
)
