"""Shapes of DeepSeek-V4, Ling, Nemotron-H, EXAONE and MiMo-V2, and what all shapes share."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,  # agreement needs an LM head of its own
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def sizes_of(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, theta: float
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "rope_theta": theta,
    }


def mimo_v2(**sizes: Any) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    return {
        **BASE,
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layernorm_epsilon": 1e-5,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "partial_rotary_factor": 0.334,
        "v_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "swa_rope_theta": 10000.0,
        "sliding_window_size": 128,
        "add_swa_attention_sink_bias": True,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        # the first layer and every sixth see everything; the first has no experts
        "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 > 0) for i in range(layers)],
        "moe_layer_freq": [int(i > 0) for i in range(layers)],
        **sizes,
    }


SHAPES_AUTUMN: dict[str, dict[str, Any]] = {
    "k-exaone-236b": {
        **BASE,
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoeForCausalLM"],
        # three layers with a window, one that sees everything
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
        "sliding_window": 128,
        "sliding_windows": [128, 128, 128, 0] * 12,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * 47,
        "mtp_layer_types": ["full_attention"],
        "mtp_sliding_windows": [0],
        "num_nextn_predict_layers": 1,
        **{**sizes_of(48, 6144, 18432, 64, 8, 153600, 1e6), "head_dim": 128},
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    # the text part alone: other engines want the vision part beside it
    "exaone-4.5-33b": {
        **BASE,
        "model_type": "exaone4_5_text",
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "sliding_window": 4096,
        "num_nextn_predict_layers": 1,
        **{**sizes_of(64, 5120, 27392, 40, 8, 153600, 1e6), "head_dim": 128},
        "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "ling-3-flash": {
        **BASE,
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "layer_group_size": 6,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **{**sizes_of(42, 2560, 6144, 32, 32, 157184, 6e6), "head_dim": 128},
        "rms_norm_eps": 1e-6,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 768,
        "first_k_dense_replace": 2,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "expert_swiglu_limit_list": [0.0] * 35 + [4.0] * 7,
        "share_expert_swiglu_limit_list": [0.0] * 34 + [5.0] * 6 + [7.0] * 2,
    },
    # sizes of Ling-mini-2.0; releases of this size declare no head, larger ones do
    "ling-mini-2": {
        **BASE,
        "model_type": "bailing_moe",
        "architectures": ["BailingMoeV2ForCausalLM"],
        "num_nextn_predict_layers": 1,
        **{**sizes_of(20, 2048, 5120, 16, 4, 157184, 6e5), "head_dim": 128},
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "nemotron-3-super": {
        **BASE,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "layer_norm_epsilon": 1e-5,
        "attention_bias": False,
        # numbers of each kind, and the first eight, as published; the order of the rest is regular
        "hybrid_override_pattern": "MEMEMEM*EME" * 8,
        "mtp_hybrid_override_pattern": "*E",
        "num_nextn_predict_layers": 1,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        # no layer has an MLP without experts: its width stands for nothing
        **{**sizes_of(88, 4096, 2688, 32, 2, 131072, 1e4), "head_dim": 128},
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
        "norm_topk_prob": True,
        "routed_scaling_factor": 5.0,
    },
    "deepseek-v4-flash": {
        **BASE,
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_nextn_predict_layers": 1,
        # two layers see near tokens only, the others windows of 4 or 128 in turns; the head's last
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
        "num_hash_layers": 3,
        "sliding_window": 128,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536,
            "beta_fast": 32, "beta_slow": 1,
        },
        # no layer is dense: its width stands for nothing
        **{**sizes_of(43, 4096, 2048, 64, 1, 129280, 1e4), "head_dim": 512},
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    },
    "mimo-v2.5": {
        **mimo_v2(
            **{**sizes_of(48, 4096, 16384, 64, 4, 152576, 1e7), "head_dim": 192},
            n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
        ),
        "model_type": "mimo_v2",
        "architectures": ["MiMoV2ForCausalLM"],
        "attention_projection_layout": "fused_qkv",
    },
}  # fmt: skip
