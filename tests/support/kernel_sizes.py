"""Sizes of checkpoints whose kernels are interpreted: programs take milliseconds each."""

from __future__ import annotations

from typing import Any

# Latent attention, in sizes that fill no tile.
LATENT: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "num_hidden_layers": 1, "vocab_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 24,
    "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip
