"""Bailing: Ling and Ring 2.0 to 2.6; attention tensors lie under `attention.`."""

from __future__ import annotations

from typing import Any

from headstart.errors import UnsupportedFamily
from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import DENSE_MLP, EXPERTS, MLA, NORMS, ROLES, SHARED_EXPERTS
from headstart.families.deepseek import dense_then_moe
from headstart.families.dims import Fields
from headstart.families.keymaps import appended_layer
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime


def _bailing_name(name: str) -> str:
    name = name.replace("self_attn.o_proj.", "attention.dense.")
    return name.replace("self_attn.", "attention.")


_FUSED_GQA = parts("""
    attention.query_key_value.weight   heads*head_dim+2*kv_heads*head_dim   hidden
    attention.dense.weight             hidden     heads*head_dim
    attention.query_layernorm.weight   head_dim   if use_qk_norm
    attention.key_layernorm.weight     head_dim   if use_qk_norm
""")
LATENT = tuple(Part(_bailing_name(part.name), part.shape, part.when) for part in MLA)
_ROUTER_BIAS = parts("mlp.gate.expert_bias experts if moe_router_enable_expert_bias")
# A width given for shared experts is that of one; SHARED_EXPERTS takes the sum of all.
WIDE_SHARED_EXPERTS = tuple(
    Part(
        part.name,
        tuple(s.replace("shared_width", "shared_experts*shared_width") for s in part.shape),
    )
    for part in SHARED_EXPERTS
)


def _block(fields: Fields) -> tuple[Part, ...]:
    attention = LATENT if fields.get("kv_lora_rank") else _FUSED_GQA  # 2.5 and later are MLA
    block = NORMS + attention + EXPERTS + _ROUTER_BIAS
    if not fields.get("num_shared_experts"):
        return block
    is_wide = fields.get("moe_shared_expert_intermediate_size") is not None
    return block + (WIDE_SHARED_EXPERTS if is_wide else SHARED_EXPERTS)


def _v2_kinds(fields: Fields) -> dict[str, tuple[Part, ...]]:
    """Of Ling-2.0; later ones have recurrent layers as well, whose tensors are not listed."""
    if fields.get("kv_lora_rank"):
        return {}
    return {"dense": NORMS + _FUSED_GQA + DENSE_MLP, "moe": _block(fields)}


def _v2_normalised(fields: Fields) -> Fields:
    scores, groups = fields.get("scoring_func"), int(fields.get("n_group") or 1)
    has_bias = bool(fields.get("moe_router_enable_expert_bias"))
    if (scores == "sigmoid") != has_bias or (scores != "sigmoid" and groups > 1):
        raise UnsupportedFamily(
            f"score_function is {scores!r}, moe_router_enable_expert_bias {has_bias}, n_group "
            f"{groups}; the engine computes Ling-2.0's experts by sigmoids with a bias, or by a "
            "soft-max without one and without groups, as vLLM does."
        )
    if fields.get("use_rmsnorm") is False:
        raise UnsupportedFamily("use_rmsnorm is false; the engine computes Ling-2.0 with it only.")
    found: dict[str, Any] = {}
    if fields.get("rotary_dim") and fields.get("head_dim"):
        found["partial_rotary_factor"] = fields["rotary_dim"] / fields["head_dim"]
    return {**found, **shared_width_of_all(fields)}


def shared_width_of_all(fields: Fields) -> Fields:
    """A width of shared experts is that of one; what is stored holds all of them."""
    width = fields.get("moe_shared_expert_intermediate_size")
    if not isinstance(width, int):
        return {}
    count = int(fields.get("num_shared_experts") or 1)
    return {"moe_shared_expert_intermediate_size": count * width, "num_shared_experts": 1}


_KEYS = appended_layer(out_norm="final_layernorm")
_TRUNK = Trunk(embed="word_embeddings.weight", kinds_of=_v2_kinds, kind_of=dense_then_moe)
NORM_HEAD = "with norm_head SGLang normalises lm_head.weight while loading; it is stored raw"
TRANSFORMERS = "transformers 5.22.2 declares generate(use_mtp=True) for bailing_hybrid, and raises"

V2 = Family(
    name="bailing_moe",
    title="Ling-2.0, Ling-2.5, Ring-2.5, Ling-2.6",
    model_types=("bailing_moe", "bailing_moe_v2", "bailing_hybrid"),
    architectures=(
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "BailingMoeV2_5ForCausalLM",
    ),
    keys=_KEYS,
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    block=_block,
    trunk=_TRUNK,
    looked_up_as={"vllm": "model.layers.{layer}.", "sglang": "model.layers.{layer}."},
    served={"vllm": "0.25.0", "sglang": "0.5.3"},
    served_apart={"vllm": "0.26.0 with our plugin, in a folder of its own"},
    variants={
        "vllm": {"bailing_moe": None, "bailing_moe_v2": None},
        "sglang": {"bailing_hybrid": "0.5.9"},
    },
    variant_titles={
        "bailing_moe": "Ling 2.0",
        "bailing_moe_v2": "Ling 2.0",
        "bailing_hybrid": "Ling 2.5 and 2.6",
    },
    block_kind="moe",
    is_complete=True,
    runtime=Runtime(
        model_types=("bailing_moe", "bailing_moe_v2"),
        defaults={
            "rms_norm_eps": 1e-6,
            "scoring_func": "softmax",
            "num_shared_experts": 0,
            "max_position_embeddings": 32768,
        },
        renamed={"score_function": "scoring_func"},
        normalise=_v2_normalised,
        refused={
            "norm_head": "the engine computes Ling-2.0 without a normalised LM head.",
            "use_bias": "the engine computes Ling-2.0 without biases.",
            "use_qkv_bias": "the engine computes Ling-2.0 without biases.",
        },
        partial_rotary=True,
        parameters=parameters("""
            attention.qkv.weight      attention.query_key_value.weight
            attention.o.weight        attention.dense.weight
            attention.q_norm.weight   attention.query_layernorm.weight
            attention.k_norm.weight   attention.key_layernorm.weight
            mlp.router.correction     mlp.gate.expert_bias
        """),
    ),
    lacks="the linear attention of Ling-2.5 and 2.6 (bailing_hybrid without KDA), for which "
    "transformers has no class to hold it to",
    notes=(
        "Ling-2.0's trunk is held to transformers' GLM-4.5 under other names: the same numbers",
        "some checkpoints call mlp.gate.expert_bias mlp.gate.e_score_correction_bias",
        NORM_HEAD,
        TRANSFORMERS,
    ),
)
