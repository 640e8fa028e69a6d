"""Shapes of well-known models, by name: sizes are published facts, weights are made."""

from __future__ import annotations

from typing import Any

from headstart.calibrate.shapes_autumn import BASE, SHAPES_AUTUMN, mimo_v2, sizes_of


def mimo(**sizes: Any) -> dict[str, Any]:
    from headstart.families.mimo import MIMO

    return {
        **BASE,
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": dict(MIMO.auto_map),
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        **sizes,
    }


def _qwen3(**sizes: Any) -> dict[str, Any]:
    return {
        **BASE,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "mtp_num_hidden_layers": 1,
        **sizes,
    }


def _glm4_moe(**sizes: Any) -> dict[str, Any]:
    return {
        **BASE,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        **sizes,
    }


def _latent(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    """Heads have no size of their own there: what is compressed decides."""
    return {
        **BASE,
        "model_type": model_type,
        "architectures": [architecture],
        "attention_bias": False,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        **{name: value for name, value in sizes.items() if name != "head_dim"},
    }


def _deepseek(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return _latent(
        model_type, architecture, **sizes_of(61, 7168, 18432, 128, 128, 129280, 1e4),
        rms_norm_eps=1e-6, max_position_embeddings=163840, q_lora_rank=1536,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1, n_group=8,
        topk_group=4, routed_scaling_factor=2.5, rope_scaling={
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }, **sizes,
    )  # fmt: skip


def _glm_latent(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return _latent(
        model_type, architecture, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1,
        **sizes,
    )  # fmt: skip


def _step3p5(**sizes: Any) -> dict[str, Any]:
    layers, full, near = sizes["num_hidden_layers"], "full_attention", "sliding_attention"
    kinds = [near if i % 4 else full for i in range(layers)] + [near] * 3
    return {
        **BASE,
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": sizes["num_key_value_heads"],
        "use_head_wise_attn_gate": True,
        "sliding_window": 512,
        "attention_other_setting": {
            "attention_type": near, "num_attention_heads": 96, "num_attention_groups": 8,
            "head_dim": 128,
        },
        "layer_types": kinds,
        "moe_layers_enum": ",".join(str(i) for i in range(3, layers)),
        "num_nextn_predict_layers": 3,
        **sizes,
    }  # fmt: skip


def _mellum(**sizes: Any) -> dict[str, Any]:
    """How often a layer sees everything is not published: every fourth here."""
    layers, full, near = sizes["num_hidden_layers"], "full_attention", "sliding_attention"
    return {
        **BASE,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "model_type": "mellum",
        "architectures": ["MellumForCausalLM"],
        "attention_bias": False,
        "layer_types": [full if i % 4 == 3 else near for i in range(layers)],
        "mlp_layer_types": ["sparse"] * layers,
        "sliding_window": 1024,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "mtp_layer_types": [near],
        "mtp_mlp_layer_types": ["sparse"],
        "rope_parameters": {
            full: {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
            near: {"rope_type": "default", "rope_theta": 10000.0},
        },
        **{name: value for name, value in sizes.items() if name != "rope_theta"},
    }


def _ernie4_5_moe(**sizes: Any) -> dict[str, Any]:
    return {
        **BASE,
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "use_bias": False,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "num_nextn_predict_layers": 1,
        **sizes,
    }


def _qwen_hybrid(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    """Three layers of four are recurrent, by `full_attention_interval`."""
    return {
        **BASE,
        "rms_norm_eps": 1e-6,
        "model_type": model_type,
        "architectures": [architecture],
        "attention_bias": False,
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        **sizes,
    }


def _qwen3_5(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    config = _qwen_hybrid(model_type, architecture, **sizes)
    config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta"),
        "partial_rotary_factor": config.pop("partial_rotary_factor"),
    }
    heads = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return {**config, **heads, "mamba_ssm_dtype": "float32"}  # of the states that engines keep


def _qwen_experts(count: int, chosen: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


# Llama trunks are made in the mimo layout, which is what they become when a head is grafted.
SHAPES: dict[str, dict[str, Any]] = {
    "mimo-7b": mimo(**sizes_of(36, 4096, 11008, 32, 8, 151680, 640000.0)),
    "llama-8b": mimo(**sizes_of(32, 4096, 14336, 32, 8, 128256, 500000.0)),
    "llama-1b": mimo(**sizes_of(16, 2048, 8192, 32, 8, 128256, 500000.0)),
    "smollm2-135m": mimo(**sizes_of(30, 576, 1536, 9, 3, 49152, 100000.0)),
    "smollm2-1.7b": mimo(**sizes_of(24, 2048, 8192, 32, 32, 49152, 130000.0)),
    "qwen2-7b": mimo(**sizes_of(28, 3584, 18944, 28, 4, 152064, 1000000.0)),
    "qwen3-8b": _qwen3(**sizes_of(36, 4096, 12288, 32, 8, 151936, 1000000.0)),
    "qwen3-0.6b": _qwen3(**{**sizes_of(28, 1024, 3072, 16, 8, 151936, 1000000.0), "head_dim": 128}),
    "qwen3-30b-a3b": {
        **_qwen3(**{**sizes_of(48, 2048, 6144, 32, 4, 151936, 1000000.0), "head_dim": 128}),
        "rms_norm_eps": 1e-6, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "glm-4.5-air": _glm4_moe(
        **{**sizes_of(46, 4096, 10944, 96, 8, 151552, 1000000.0), "head_dim": 128},
        n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=1408, first_k_dense_replace=1, routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "deepseek-v3": _deepseek("deepseek_v3", "DeepseekV3ForCausalLM"),
    "deepseek-v3.2": _deepseek(
        "deepseek_v32", "DeepseekV32ForCausalLM", index_n_heads=64, index_head_dim=128,
        index_topk=2048,
    ),
    "glm-4.7-flash": _glm_latent(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", q_lora_rank=768,
        **sizes_of(47, 2048, 10240, 20, 20, 154880, 1e6), n_routed_experts=64,
        num_experts_per_tok=4, moe_intermediate_size=1536, first_k_dense_replace=1,
        routed_scaling_factor=1.8,
    ),
    "glm-5": _glm_latent(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", q_lora_rank=2048,
        **sizes_of(78, 6144, 12288, 64, 64, 154880, 1e6), n_routed_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
        routed_scaling_factor=2.5, index_n_heads=32, index_head_dim=128, index_topk=2048,
        indexer_rope_interleave=True,
    ),
    "glm-5.3-flash": _latent(
        "glm5_next_text", "Glm5NextForConditionalGeneration",
        **sizes_of(45, 4096, 12288, 64, 64, 154880, 1e4), max_position_embeddings=1048576,
        q_lora_rank=1536, qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256,
        n_routed_experts=288, num_experts_per_tok=8, moe_intermediate_size=2048, n_group=1,
        topk_group=1, routed_scaling_factor=2.5, swiglu_limit=10.0, index_n_heads=32,
        index_head_dim=128, index_topk=2048, index_kpool=4, hc_mult=4, hc_sinkhorn_iters=20,
        hc_eps=1e-6, linear_num_heads=64, linear_head_dim=128, linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0, mlp_layer_types=["dense"] * 3 + ["sparse"] * 42,
        layer_types=[
            "indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(45)
        ],
    ),
    "hy4-preview": _latent(
        "hy_v4", "HYV4ForCausalLM", **sizes_of(78, 6144, 18432, 64, 64, 120832, 1e7),
        max_position_embeddings=1048576, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_group=1,
        topk_group=1, routed_scaling_factor=2.827, swiglu_limit=10.0, index_n_heads=32,
        index_head_dim=128, index_topk=2048, hc_mult=4, hc_magnitude=2.0, hc_eps=1e-6,
        mlp_layer_types=["dense"] + ["sparse"] * 77, layer_types=["sparse_attention"] * 78,
        indexer_types=["shared" if i % 4 != 1 and i > 0 else "full" for i in range(78)],
    ),
    "mimo-v2-flash": mimo_v2(
        **{**sizes_of(48, 4096, 16384, 64, 4, 152576, 5e6), "head_dim": 192},
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
    ),
    **SHAPES_AUTUMN,
    "step-3.5-flash": _step3p5(
        **{**sizes_of(45, 4096, 11264, 64, 8, 128815, 5e6), "head_dim": 128},
        moe_num_experts=288, moe_top_k=8, moe_intermediate_size=1280, share_expert_dim=1280,
    ),
    "mellum-2": _mellum(
        **{**sizes_of(28, 2304, 7168, 32, 4, 98304, 500000.0), "head_dim": 128}, num_experts=64,
        num_experts_per_tok=8, moe_intermediate_size=896,
    ),
    "ernie-4.5-21b": _ernie4_5_moe(
        **sizes_of(28, 2560, 12288, 20, 4, 103424, 500000.0),
        moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_intermediate_size=1536,
    ),
    "qwen3-next-80b": _qwen_hybrid(
        "qwen3_next", "Qwen3NextForCausalLM", linear_num_value_heads=32, **_qwen_experts(512, 10),
        **{**sizes_of(48, 2048, 5120, 16, 2, 151936, 1e7), "head_dim": 256},
    ),
    # without the embedding of several tokens, whose table alone has 95 GiB
    "qwen3.8-flash-next": _qwen3_5(
        "qwen4_exp_text", "Qwen4ExpForCausalLM", linear_num_value_heads=48, hc_count=4,
        hc_lowrank=320, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128,
        indexer_budget=2048, indexer_compress_ratio=4, ple_layer_ids=[],
        **{**_qwen_experts(512, 10), "moe_intermediate_size": 640,
           "shared_expert_intermediate_size": 640},
        # no layer is dense: its width stands for nothing
        **{**sizes_of(48, 2560, 640, 24, 2, 248320, 1e7), "head_dim": 256},
    ),
    "qwen3.5-27b": _qwen3_5(
        "qwen3_5_text", "Qwen3_5ForCausalLM", linear_num_value_heads=48,
        **{**sizes_of(64, 5120, 17408, 24, 4, 248320, 1e7), "head_dim": 256},
    ),
    "qwen3.5-35b": _qwen3_5(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", linear_num_value_heads=32,
        **_qwen_experts(256, 8),
        # no layer is dense: its width stands for nothing
        **{**sizes_of(40, 2048, 512, 16, 2, 248320, 1e7), "head_dim": 256},
    ),
}  # fmt: skip
