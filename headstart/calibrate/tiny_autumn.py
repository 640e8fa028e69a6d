"""Small configs of the families of autumn 2026; see tiny_configs.py, which lists them all."""

from __future__ import annotations

from typing import Any

from headstart.calibrate.tiny_parts import COMMON, INDEXER, MLA, QWEN_MOE, SIGMOID_MOE

# No engine runs these yet that would insist on real latent sizes.
_SMALL_MLA: dict[str, Any] = {
    **MLA,
    "pad_token_id": 1,  # that of the config classes lies beyond a small vocabulary
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
}
_SMALL_INDEXER: dict[str, Any] = {**INDEXER, "index_head_dim": 32, "index_n_heads": 2}
_GLM5_NEXT: dict[str, Any] = {
    **COMMON, **SIGMOID_MOE, **_SMALL_MLA, **_SMALL_INDEXER,
    "model_type": "glm5_next_text",
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_kpool": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "hc_mult": 4,
    "swiglu_limit": 10.0,
}  # fmt: skip
_QWEN4_EXP: dict[str, Any] = {
    **COMMON, **QWEN_MOE,
    "model_type": "qwen4_exp_text",
    "mtp_num_hidden_layers": 1,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "hc_count": 4,
    "hc_lowrank": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
_NOT_OF_LING = ("n_routed_experts", "q_lora_rank")

_EXAONE: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "rope_theta"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
}

TINY_AUTUMN: dict[str, dict[str, Any]] = {
    "exaone_moe": {
        **_EXAONE,
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoeForCausalLM"],
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_windows": [128, 128, 0],  # vLLM reads these, transformers sliding_window
        "mtp_layer_types": ["full_attention"],
        "mtp_sliding_windows": [0],
    },
    "exaone4_5": {
        "model_type": "exaone4_5",
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {**_EXAONE, "model_type": "exaone4_5_text"},
        "vision_config": {"model_type": "exaone4_5_vision"},
    },
    "mellum": {
        **COMMON,
        "model_type": "mellum",
        "architectures": ["MellumForCausalLM"],
        "num_nextn_predict_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["sparse"],
        "sliding_window": 128,
    },
    "glm5_next": {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": _GLM5_NEXT,
        "vision_config": {"model_type": "glm5_next_vision"},
    },
    "hy_v4": {
        **COMMON, **SIGMOID_MOE, **_SMALL_MLA, **_SMALL_INDEXER,
        "model_type": "hy_v4",
        "architectures": ["HYV4ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
        "hc_mult": 4,
    },
    "qwen4_exp": {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": _QWEN4_EXP,
        "vision_config": {"model_type": "qwen4_exp_vision"},
    },
    "motif": {
        **COMMON,
        "model_type": "motif",
        "architectures": ["MotifForCausalLM"],
        "num_nextn_predict_layers": 1,
        "num_noise_heads": 1,
        "head_dim": 64,
        "v_head_dim": 32,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "elementwise_attn_output_gate": True,
        "sliding_window": 128,
    },
    "gigachat3_5": {
        **COMMON, **SIGMOID_MOE, **_SMALL_MLA,
        "model_type": "gigachat3_5",
        "architectures": ["GigaChat35ForCausalLM"],
        "num_nextn_predict_layers": 2,
        "norm_type": "ZeroCenteredGatedNorm",
        "layernorm_type": "pre_post",
        "use_attention_gate": True,
    },
    "openpangu_v2": {
        **COMMON, **SIGMOID_MOE, **_SMALL_MLA,
        "model_type": "openpangu_v2",
        "architectures": ["OpenPanguV2ForCausalLM"],
        "num_nextn_predict_layers": 3,
        "sandwich_norm": True,
        "router_enable_expert_bias": True,
        "param_sink_number": 8,
        "mhc_num_stream": 4,
        "mhc_recur_norm": 20,
    },
    "bailing_moe_v3": {
        **{k: v for k, v in (COMMON | SIGMOID_MOE | _SMALL_MLA).items() if k not in _NOT_OF_LING},
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "num_experts": 4,
        "num_shared_experts": 1,
        "layer_group_size": 3,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
    },
}  # fmt: skip
