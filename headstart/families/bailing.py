"""Bailing: Ling and Ring 2.0 to 2.6, and Ling-3.0; attention tensors lie under `attention.`."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import EXPERTS, MLA, NORMS, ROLES, SHARED_EXPERTS
from headstart.families.deepseek import dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer


def _bailing_name(name: str) -> str:
    name = name.replace("self_attn.o_proj.", "attention.dense.")
    return name.replace("self_attn.", "attention.")


_FUSED_GQA = parts("""
    attention.query_key_value.weight   heads*head_dim+2*kv_heads*head_dim   hidden
    attention.dense.weight             hidden     heads*head_dim
    attention.query_layernorm.weight   head_dim   if use_qk_norm
    attention.key_layernorm.weight     head_dim   if use_qk_norm
""")
_LATENT = tuple(Part(_bailing_name(part.name), part.shape, part.when) for part in MLA)
_ROUTER_BIAS = parts("mlp.gate.expert_bias experts if moe_router_enable_expert_bias")
# A width given for shared experts is that of one; SHARED_EXPERTS takes the sum of all.
_WIDE_SHARED_EXPERTS = tuple(
    Part(
        part.name,
        tuple(s.replace("shared_width", "shared_experts*shared_width") for s in part.shape),
    )
    for part in SHARED_EXPERTS
)


def _block(fields: Fields) -> tuple[Part, ...]:
    attention = _LATENT if fields.get("kv_lora_rank") else _FUSED_GQA  # 2.5 and later are MLA
    block = NORMS + attention + EXPERTS + _ROUTER_BIAS
    if not fields.get("num_shared_experts"):
        return block
    is_wide = fields.get("moe_shared_expert_intermediate_size") is not None
    return block + (_WIDE_SHARED_EXPERTS if is_wide else SHARED_EXPERTS)


_KEYS = appended_layer(out_norm="final_layernorm")
_TRUNK = Trunk(embed="word_embeddings.weight", kind_of=dense_then_moe)
_NORM_HEAD = "with norm_head SGLang normalises lm_head.weight while loading; it is stored raw"

V2 = Family(
    name="bailing_moe",
    title="Ling-2.0, Ling-2.5, Ring-2.5, Ling-2.6",
    model_types=("bailing_moe", "bailing_moe_v2", "bailing_hybrid"),
    architectures=("BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM"),
    keys=_KEYS,
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    block=_block,
    trunk=_TRUNK,
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.layers.{layer}."},
    served={"vllm": "0.25.0", "sglang": "0.5.3"},
    variants={
        "vllm": {"bailing_moe": None, "bailing_moe_v2": None},
        "sglang": {"bailing_hybrid": "0.5.9"},
    },
    variant_titles={
        "bailing_moe": "Ling 2.0",
        "bailing_moe_v2": "Ling 2.0",
        "bailing_hybrid": "Ling 2.5 and 2.6",
    },
    notes=(
        "some checkpoints call mlp.gate.expert_bias mlp.gate.e_score_correction_bias",
        _NORM_HEAD,
    ),
)

V3 = Family(
    name="bailing_moe_v3",
    title="Ling-3.0-flash",
    model_types=("bailing_moe_v3",),
    architectures=("BailingMoeV3ForCausalLM",),
    marked_types=("bailing_hybrid",),
    marks=("short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound", "no_kda_lora"),
    keys=_KEYS,
    layout=HeadLayout(),
    head=ROLES,
    # No block table: whether the MLA layer has an output gate, and how wide, is up to the config.
    trunk=_TRUNK,
    kv_elements="kv_rank+rope_dim",
    looked_up_as={"vllm": "model.layers.{layer}."},
    served={"vllm": "0.28.0rc1", "llamacpp": "b10470"},
    notes=(
        "the fusion projection may be quantised",
        "Ling-3.0-tiny declares 0 modules: it has no head",
        _NORM_HEAD,
    ),
)
