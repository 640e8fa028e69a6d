"""What keys with one value for each layer hold for a module of a head, by architecture."""

from __future__ import annotations

from typing import Any

from headstart.families.dims import Fields


def _limit(fields: Fields, name: str, module: int) -> float:
    """The limit of a module in a list with one for each layer; 0, which is none, past its end."""
    limits = fields.get(name) or []
    layer = int(fields.get("num_hidden_layers") or 0) + module
    return float(limits[layer] or 0.0) if layer < len(limits) else 0.0


def step_values(fields: Fields, module: int) -> dict[str, Any]:
    kinds = fields.get("layer_types") or []
    layer = int(fields.get("num_hidden_layers") or 0) + module
    slides = kinds[layer : layer + 1] == ["sliding_attention"]
    own = fields.get("attention_other_setting") or {} if slides else {}
    groups = fields.get("num_attention_groups") or fields.get("num_key_value_heads")
    return {
        "attention.head_count": own.get("num_attention_heads", fields.get("num_attention_heads")),
        "attention.head_count_kv": own.get("num_attention_groups", groups),
        "attention.sliding_window_pattern": slides,
        "swiglu_clamp_exp": _limit(fields, "swiglu_limits", module),
        "swiglu_clamp_shexp": _limit(fields, "swiglu_limits_shared", module),
    }


def mimo_values(fields: Fields, module: int) -> dict[str, Any]:
    return {
        "attention.head_count_kv": fields.get("swa_num_key_value_heads"),
        "attention.sliding_window_pattern": 1,
    }


def nemotron_values(fields: Fields, module: int) -> dict[str, Any]:
    return {
        "attention.head_count_kv": fields.get("num_key_value_heads"),
        "feed_forward_length": fields.get("moe_intermediate_size"),
    }


def qwen_values(fields: Fields, module: int) -> dict[str, Any]:
    return {"attention.recurrent_layers": False}


def bailing_values(fields: Fields, module: int) -> dict[str, Any]:
    return {
        "attention.head_count_kv": 1,  # latent attention, which linear layers have none of
        "swiglu_clamp_exp": _limit(fields, "expert_swiglu_limit_list", module),
        "swiglu_clamp_shexp": _limit(fields, "share_expert_swiglu_limit_list", module),
    }
