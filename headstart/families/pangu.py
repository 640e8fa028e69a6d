"""openPangu-Ultra-MoE, and openPangu 2.0 with three chained modules.

The first is the DeepSeek-V3 head with optional norms around the MLP. The second has convolutions
and sinks in latent attention; what its modules are fed and hand on is disputed between engines:
`layout` is what its makers' own engine (omni-infer) does, and `deviations` name the others.
"""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, MLA, NORMS, ROLES, SHARED_EXPERTS
from headstart.families.deepseek import LAYOUT, dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer

_OPTIONAL = parts("""
    mlp.gate.e_score_correction_bias   experts   if router_enable_expert_bias
    pre_mlp_layernorm.weight           hidden    if sandwich_norm
    post_mlp_layernorm.weight          hidden    if sandwich_norm
""")
_ULTRA_LAYER = NORMS + MLA + EXPERTS + SHARED_EXPERTS + _OPTIONAL


def _block(fields: Fields) -> tuple[Part, ...]:
    """The layer, where the config uses DeepSeek's field names; others are left to the trunk."""
    return _ULTRA_LAYER if fields.get("kv_lora_rank") and fields.get("n_routed_experts") else ()


ULTRA_MOE = Family(
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

_V2_ATTENTION = (
    NORMS
    + MLA
    + parts("""
    self_attn.qa_conv.weight             q_rank        1   3
    self_attn.compresskv_conv.weight     kv_rank       1   3
    self_attn.o_conv.weight              heads*v_dim   1   3
    self_attn.param_sink_compressed_kv   sinks         kv_rank
    self_attn.param_sink_k_pe            sinks         rope_dim
    pre_mlp_layernorm.weight             hidden        if sandwich_norm
    post_mlp_layernorm.weight            hidden        if sandwich_norm
""")
)
_MIXER = """
    {at}phi.weight     2*hc+hc*hc   hc*hidden
    {at}branch_alpha   3
    {at}branch_beta    2*hc+hc*hc
    {at}norm_gamma     hc*hidden
"""
_STREAMS = parts(_MIXER.format(at="attn_mhc_module.") + _MIXER.format(at="mlp_mhc_module."))
_V2_LAYER = (
    _V2_ATTENTION
    + EXPERTS
    + SHARED_EXPERTS
    + parts("mlp.e_score_correction_bias experts if router_enable_expert_bias")
)

V2 = Family(
    name="openpangu_v2",
    title="openPangu-2.0-Flash",
    model_types=("openpangu_v2",),
    architectures=("OpenPanguV2ForCausalLM",),
    default_modules=3,
    keys=appended_layer(),
    layout=HeadLayout(
        trunk_hidden="before_final_norm",
        recycled_hidden="before_out_norm",
        topology="chained",
        deviations={
            "ik_llama.cpp": {
                "trunk_hidden": "after_final_norm",
                "recycled_hidden": "after_out_norm",
            }
        },
    ),
    head=ROLES,
    block=lambda fields: _V2_LAYER,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    # Some layers add an indexer to this, and a norm over all streams.
    trunk=Trunk(
        kinds={"dense": _V2_ATTENTION + DENSE_MLP + _STREAMS, "moe": _V2_LAYER + _STREAMS},
        kind_of=dense_then_moe,
        extras=parts("""
            merge_mhc_module.phi.weight         hc   hc*hidden
            merge_mhc_module.branch_alpha_pre   1
            merge_mhc_module.branch_beta_pre    hc
            merge_mhc_module.norm_gamma         hc*hidden
        """),
    ),
    kv_elements="kv_rank+rope_dim",
    elsewhere=(
        "omni-infer (Ascend)",
        "exllamav3",
        "ik_llama.cpp from pull request 2065 (--spec-type mtp:n_max=1,heads=1)",
    ),
    is_complete=True,
    lacks="convolutions and sinks in latent attention, several residual streams, and a contract "
    "that is settled (engines feed and recycle states before or after the norms)",
    is_probed_apart=True,
    disputed="omni-infer and exllamav3 feed and recycle states before the norms, ik_llama.cpp "
    "after them",
    notes=(
        "mlp.e_score_correction_bias lies beside mlp.gate, not below it",
        "vLLM pull request 47271 is open",
        "`headstart inspect --probe` runs it under both contracts, which no real weights were "
        "held against here",
    ),
)
