"""Sizes of checkpoints whose kernels are interpreted: programs take milliseconds each."""

from __future__ import annotations

from typing import Any

# Layers that see everything and layers with short windows, which the heads' modules have, too.
_EXPERTS: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "moe_intermediate_size": 32,
}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    "mimo_v2": {
        **_EXPERTS, "v_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 16, "swa_v_head_dim": 12, "sliding_window_size": 2,
        "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1],
    },
    "step3p5": {
        **_EXPERTS, "num_attention_groups": 1, "sliding_window": 3, "share_expert_dim": 32,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 4, "moe_layers_enum": "1",
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 4,
            "num_attention_groups": 1, "head_dim": 16,
        },
    },
    "mellum": {
        **_EXPERTS, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"],
    },
    "exaone_moe": {
        **_EXPERTS, "sliding_window": 3, "sliding_windows": [0, 3], "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip

# Latent attention, in sizes that fill no tile.
LATENT: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "num_hidden_layers": 1, "vocab_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 24,
    "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip

# Rows see the best three of their entries; the second layer of GLM sees what the first one chose.
_INDEX = {"first_k_dense_replace": 0, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**LATENT, **_INDEX, "num_hidden_layers": 2},
    "glm_moe_dsa": {
        **LATENT, **_INDEX, "num_hidden_layers": 2, "indexer_types": ["full", "shared", "full"],
    },
}  # fmt: skip
