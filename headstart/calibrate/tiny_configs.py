"""A small config for every fully supported family: all its parts, in the sizes of a toy.

Real field names and, where an engine insists (DeepSeek's latent sizes), real values, so that the
engines load what is made from them. The vocabulary is half the hidden size, which lets every token
have an orthogonal key (see `agreement.py`).
"""

from __future__ import annotations

from typing import Any

from headstart.calibrate.tiny_autumn import TINY_AUTUMN
from headstart.calibrate.tiny_parts import COMMON, INDEXER, MLA, QWEN_MOE, SIGMOID_MOE
from headstart.families.mimo import MIMO

_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
}


def _without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in fields}


def _qwen3_5(kind: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The text part of Qwen3.5: rotary settings live in an object of their own there."""
    text = {**_without(COMMON, "rope_theta"), **_HYBRID, **extra}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    text["model_type"] = kind
    text["mtp_num_hidden_layers"] = 1
    text["mtp_use_dedicated_embeddings"] = False
    return text


_QWEN3_5 = _qwen3_5("qwen3_5_text", {})
_QWEN3_5_MOE = _qwen3_5("qwen3_5_moe_text", QWEN_MOE)

# variant -> config; the family is found from it as from any other config
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **COMMON, **SIGMOID_MOE, **MLA,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v32": {
        **COMMON, **SIGMOID_MOE, **MLA, **INDEXER,
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v4": {
        **COMMON, **SIGMOID_MOE, **INDEXER,
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 128,
        "head_dim": 128,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "hc_mult": 4,
        "intermediate_size": 64,  # no layer is dense; transformers takes it for an expert's
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 0],
        "sliding_window": 128,
        "scoring_func": "sqrtsoftplus",
        "compress_rope_theta": 160000.0,
        "expert_dtype": "fp8",
    },
    "glm4_moe": {
        **COMMON, **SIGMOID_MOE,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {
        **COMMON, **SIGMOID_MOE, **MLA,
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {
        **COMMON, **SIGMOID_MOE, **MLA, **INDEXER,
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 1,
        "index_topk_pattern": "F",
        "indexer_types": ["full", "full", "full"],
    },
    "qwen3_next": {
        **COMMON, **_HYBRID, **QWEN_MOE,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": _QWEN3_5,
        "vision_config": {"model_type": "qwen3_5"},
    },
    "qwen3_5_text": {**_QWEN3_5, "architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": _QWEN3_5_MOE,
        "vision_config": {"model_type": "qwen3_5_moe"},
    },
    "qwen3_5_moe_text": {**_QWEN3_5_MOE, "architectures": ["Qwen3_5MoeForCausalLM"]},
    "qwen3": {
        **COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "mtp_num_hidden_layers": 1,
        "attention_bias": False,
    },
    "mimo": {
        **COMMON,
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": dict(MIMO.auto_map),
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
    },
    "mimo_v2": {
        **COMMON, **SIGMOID_MOE,
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layernorm_epsilon": 1e-5,
        "v_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 48,
        "swa_v_head_dim": 32,
        "swa_rope_theta": 10000.0,
        "sliding_window_size": 128,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
    },
    "ernie4_5_moe": {
        **COMMON,
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "num_nextn_predict_layers": 1,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "use_bias": False,
    },
    "nemotron_h": {
        **COMMON,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*E-",
        "mtp_hybrid_override_pattern": "*E",
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "use_conv_bias": True,
    },
    "step3p5": {
        **COMMON,
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "num_nextn_predict_layers": 3,
        "num_attention_groups": 2,
        "use_head_wise_attn_gate": True,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 4,
            "num_attention_groups": 2,
            "head_dim": 64,
        },
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3,
        "sliding_window": 128,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_layers_enum": "1,2",
    },
    **TINY_AUTUMN,
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "mtp_num_hidden_layers": 1,
        "attention_bias": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "llama": {
        **COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {
        **COMMON,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
    },
}  # fmt: skip
