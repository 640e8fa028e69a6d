"""openPangu 2.0: three chained modules with convolutions and sinks in latent attention.

What the modules are fed and hand on is disputed between engines; `layout` is what its makers' own
engine (omni-infer) does, and `deviations` name the others.
"""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, MLA, NORMS, ROLES, SHARED_EXPERTS
from headstart.families.deepseek import dense_then_moe
from headstart.families.keymaps import appended_layer

_ATTENTION = (
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
_MOE = (
    _ATTENTION
    + EXPERTS
    + SHARED_EXPERTS
    + parts("mlp.e_score_correction_bias experts if router_enable_expert_bias")
)

FAMILY = Family(
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
    block=lambda fields: _MOE,
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    # Trunk layers add an indexer to some, and streams with hyper-connections to all of this.
    trunk=Trunk(kinds={"dense": _ATTENTION + DENSE_MLP, "moe": _MOE}, kind_of=dense_then_moe),
    kv_elements="kv_rank+rope_dim",
    elsewhere=(
        "omni-infer (Ascend)",
        "exllamav3",
        "ik_llama.cpp from pull request 2065 (--spec-type mtp:n_max=1,heads=1)",
    ),
    is_complete=True,
    lacks="convolutions and sinks in latent attention, several residual streams, and a contract "
    "that is settled (engines feed and recycle states before or after the norms)",
    disputed="omni-infer and exllamav3 feed and recycle states before the norms, ik_llama.cpp "
    "after them",
    notes=(
        "mlp.e_score_correction_bias lies beside mlp.gate, not below it",
        "vLLM pull request 47271 is open",
    ),
)
