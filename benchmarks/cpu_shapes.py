"""Small shapes of families and kinds of layers, with SmolLM2-135M's vocabulary and hidden size."""

from __future__ import annotations

from typing import Any

from headstart.calibrate.shape_config import shape_config

VOCAB, DENSE = 49152, "smollm2-135m"
_SIZES = {"hidden_size": 576, "vocab_size": VOCAB}
_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
_LATENT = {
    "num_attention_heads": 9, "num_key_value_heads": 9, "q_lora_rank": 256, "kv_lora_rank": 192,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 48,
}  # fmt: skip
_HYBRID = {
    **_SIZES, **_HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
# name -> the shape that it is made of, and what is changed
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    DENSE: (DENSE, {}),
    "qwen3": ("qwen3-0.6b,layers=28", {**_SIZES, **_HEADS, "intermediate_size": 1536}),
    "glm-4.5": (
        "glm-4.5-air,layers=20",
        {
            **_SIZES, **_HEADS, "intermediate_size": 1536,
            "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
            "use_qk_norm": True,
        },
    ),
    "ernie-4.5": (
        "ernie-4.5-21b,layers=20",
        {
            **_SIZES, **_HEADS, "intermediate_size": 1536,
            "moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 256,
        },
    ),
    "glm-4.7-flash": (
        "glm-4.7-flash,layers=20",
        {
            **_SIZES, **_LATENT, "intermediate_size": 1536,
            "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        },
    ),
    "deepseek-v3": (
        "deepseek-v3,layers=20",
        {
            **_SIZES, **_LATENT, "intermediate_size": 1536,
            "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
            "n_group": 4, "topk_group": 2,
        },
    ),
    "qwen3.5": ("qwen3.5-27b,layers=24", {**_HYBRID, "intermediate_size": 1536}),
    "qwen3.5-moe": (
        "qwen3.5-35b,layers=20",
        {
            **_HYBRID, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        },
    ),
    "mimo-v2": (
        "mimo-v2-flash,layers=16",
        {
            **_SIZES, **_HEADS, "intermediate_size": 1536, "partial_rotary_factor": 0.5,
            "v_head_dim": 48, "swa_head_dim": 64, "swa_v_head_dim": 48,
            "swa_num_attention_heads": 9, "swa_num_key_value_heads": 3, "n_routed_experts": 32,
            "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        },
    ),
    "step-3.5": (
        "step-3.5-flash,layers=16",
        {
            **_SIZES, **_HEADS, "intermediate_size": 1536, "num_attention_groups": 3,
            "attention_other_setting": {
                "attention_type": "sliding_attention", "num_attention_heads": 9,
                "num_attention_groups": 3, "head_dim": 64,
            },
            "moe_num_experts": 32, "moe_top_k": 4, "moe_intermediate_size": 256,
            "share_expert_dim": 256,
        },
    ),
    "qwen3-moe": (
        "qwen3-30b-a3b,layers=20",
        {**_SIZES, **_HEADS, **_EXPERTS, "intermediate_size": 1536},
    ),
    "qwen3-next": (
        "qwen3-next-80b,layers=20",
        {**_HYBRID, **_EXPERTS, "intermediate_size": 1536, "shared_expert_intermediate_size": 256},
    ),
    "ling-2": (
        "ling-mini-2,layers=20",
        {**_SIZES, **_HEADS, **_EXPERTS, "intermediate_size": 1536, "n_group": 4, "topk_group": 2},
    ),
    "mellum-2": (
        "mellum-2,layers=20", {**_SIZES, **_HEADS, **_EXPERTS, "intermediate_size": 1536}
    ),
    "k-exaone": (
        "k-exaone-236b,layers=20", {**_SIZES, **_HEADS, **_EXPERTS, "intermediate_size": 1536}
    ),
    # what no compiled layers run
    "deepseek-v3.2": (
        "deepseek-v3.2,layers=20",
        {
            **_SIZES, **_LATENT, "intermediate_size": 1536,
            "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
            "n_group": 4, "topk_group": 2, "index_n_heads": 8, "index_head_dim": 64,
        },
    ),
    "glm-5": (
        "glm-5,layers=20",
        {
            **_SIZES, **_LATENT, "intermediate_size": 1536,
            "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
            "index_n_heads": 8, "index_head_dim": 64,
        },
    ),
    "exaone-4.5": ("exaone-4.5-33b,layers=28", {**_SIZES, **_HEADS, "intermediate_size": 1536}),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    base, own = FAMILIES[name]
    return {**shape_config(base), **own}
