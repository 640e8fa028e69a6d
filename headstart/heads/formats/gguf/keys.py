"""The keys of a GGUF file with a head alone, made of a published config.

llama.cpp loads such a file as a model without its trunk's layers, so it asks for everything that
it asks of the whole: these are the keys, and the kinds of their values, that its converter writes
with --mtp (conversion/ of v0.5.0). An architecture names one of the functions at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.gguf.fields import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Field
from headstart.checkpoint.gguf.fields import field as make_field
from headstart.errors import BadConfig
from headstart.families.dims import Fields

Keys = dict[str, Any]  # below the architecture's name; None: not written
_SIGMOID = 2
_GATING = {"softmax": 1, "sigmoid": _SIGMOID, "sqrtsoftplus": 4}
_MROPE = [11, 11, 10, 0]  # of Qwen3.5, where the config does not say


def as_fields(prefix: str, keys: Mapping[str, Any]) -> list[Field]:
    """Keys with the kinds that llama.cpp's converter gives such values."""
    return [
        _field(f"{prefix}.{name}", value) for name, value in keys.items() if value is not None
    ]  # fmt: skip


def _field(name: str, value: Any) -> Field:
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
    if not isinstance(value, list):
        return make_field(name, value, kinds[type(value)])
    item = type(value[0]) if value else int
    return make_field(name, value, ARRAY, INT32 if item is int else kinds[item])


def _number(fields: Fields, *names: str) -> int:
    """A whole number that must be there, under the first name that has one."""
    found = next((fields[name] for name in names if fields.get(name) is not None), None)
    if type(found) is not int or not 0 <= found < 1 << 32:
        raise BadConfig(
            f"the config has {names[0]} {str(found)[:40]}; expected a whole number, which a GGUF "
            "file with a head alone must hold. Give the trunk as GGUF instead: --trunk FILE.gguf."
        )
    return found


def _optional(fields: Fields, *names: str) -> int | None:
    return _number(fields, *names) if any(fields.get(n) is not None for n in names) else None


def _real(fields: Fields, name: str) -> float | None:
    found = fields.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise BadConfig(
            f"the config has {name} {str(found)[:40]}; expected a number. Download it again."
        )
    return float(found)


def _rope(fields: Fields) -> Fields:
    """Settings of the rotation, wherever the config keeps them."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = dict(given) if isinstance(given, dict) else {}
    rope.setdefault("rope_type", rope.get("type"))
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        rope.setdefault(name, fields.get(name))
    return rope


def _scaling(rope: Fields) -> Keys:
    if rope["rope_type"] not in ("linear", "yarn") or rope.get("factor") is None:
        return {}
    keys: Keys = {
        "rope.scaling.type": rope["rope_type"], "rope.scaling.factor": _real(rope, "factor"),
    }  # fmt: skip
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = _number(
            rope, "original_max_position_embeddings"
        )
        attention = "attention_factor" if "attention_factor" in rope else "attn_factor"
        names = {
            "ext_factor": "extrapolation_factor", "attn_factor": attention,
            "beta_fast": "beta_fast", "beta_slow": "beta_slow",
        }  # fmt: skip
        keys |= {f"rope.scaling.yarn_{each}": _real(rope, name) for each, name in names.items()}
    return keys


def _usual(fields: Fields) -> Keys:
    """What every architecture has."""
    rope = _rope(fields)
    sections = rope.get("mrope_section")
    score = next((fields[n] for n in ("score_function", "scoring_func") if fields.get(n)), None)
    width = _optional(fields, "head_dim")
    return {
        "context_length": _optional(fields, "max_position_embeddings"),
        "embedding_length": _number(fields, "hidden_size"),
        "feed_forward_length": _optional(fields, "intermediate_size"),
        "attention.head_count": _number(fields, "num_attention_heads"),
        "attention.head_count_kv": _optional(fields, "num_key_value_heads"),
        **_scaling(rope),
        "rope.dimension_sections": [*sections, 0, 0, 0][:4] if sections else None,
        "rope.freq_base": _real(rope, "rope_theta"),
        "attention.layer_norm_rms_epsilon": _real(fields, "rms_norm_eps"),
        "expert_count": _optional(fields, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": _optional(fields, "num_experts_per_tok"),
        "expert_group_count": _optional(fields, "n_group"),
        "expert_group_used_count": _optional(fields, "topk_group"),
        "expert_gating_func": _GATING.get(str(score)),
        "attention.key_length": width,
        "attention.value_length": width,
    }


def _rotated(fields: Fields, share: float) -> int:
    """Values of an attention head that are rotated; `share`: where the config does not say."""
    width = _optional(fields, "head_dim")
    if width is None:
        width = _number(fields, "hidden_size") // max(1, _number(fields, "num_attention_heads"))
    found = _real(_rope(fields), "partial_rotary_factor")
    return int(width * (share if found is None else found))


def qwen_next_keys(fields: Fields, num_modules: int) -> Keys:
    kinds = fields.get("layer_types")
    heads = _number(fields, "linear_num_value_heads")
    return {
        **_usual(fields),
        "expert_feed_forward_length": _optional(fields, "moe_intermediate_size"),
        "expert_shared_feed_forward_length": _optional(fields, "shared_expert_intermediate_size"),
        "ssm.conv_kernel": _number(fields, "linear_conv_kernel_dim"),
        "ssm.state_size": _number(fields, "linear_key_head_dim"),
        "ssm.group_count": _number(fields, "linear_num_key_heads"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": _number(fields, "linear_value_head_dim") * heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds]
        + [False] * num_modules
        if isinstance(kinds, list)
        else None,
        "full_attention_interval": _optional(fields, "full_attention_interval") or 4,
        "rope.dimension_count": _rotated(fields, 0.25),
    }


def qwen_keys(fields: Fields, num_modules: int) -> Keys:
    keys = qwen_next_keys(fields, num_modules)
    return keys | {"rope.dimension_sections": keys["rope.dimension_sections"] or _MROPE}


def latent_keys(fields: Fields, num_modules: int) -> Keys:
    """Latent attention is stored as one shared key head of the latent's width."""
    rank, rotated = _number(fields, "kv_lora_rank"), _number(fields, "qk_rope_head_dim")
    mscale = _real(_rope(fields), "mscale_all_dim")
    return {
        **_usual({"rms_norm_eps": 1e-6, **fields, "num_key_value_heads": 1}),
        "leading_dense_block_count": _optional(fields, "first_k_dense_replace") or 0,
        "vocab_size": _number(fields, "vocab_size"),
        "attention.q_lora_rank": _optional(fields, "q_lora_rank"),
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": _number(fields, "qk_nope_head_dim") + rotated,
        "attention.value_length_mla": _number(fields, "v_head_dim"),
        "expert_feed_forward_length": _number(fields, "moe_intermediate_size", "intermediate_size"),
        "expert_shared_count": _optional(fields, "n_shared_experts") or 0,
        "expert_weights_scale": _real(fields, "routed_scaling_factor"),
        "expert_weights_norm": True if fields.get("norm_topk_prob") else None,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": None if mscale is None else 0.1 * mscale,
    }


def sparse_keys(fields: Fields, num_modules: int) -> Keys:
    kinds = fields.get("indexer_types")
    return {
        **latent_keys(fields, num_modules),
        "attention.indexer.head_count": _number(fields, "index_n_heads"),
        "attention.indexer.key_length": _number(fields, "index_head_dim"),
        "attention.indexer.top_k": _number(fields, "index_topk"),
        "attention.indexer.types": [kind == "full" for kind in kinds]
        if isinstance(kinds, list)
        else None,
    }


def glm_sparse_keys(fields: Fields, num_modules: int) -> Keys:
    share = _real(_rope(fields), "partial_rotary_factor")
    rotated = _number(fields, "qk_rope_head_dim")
    keys = sparse_keys(fields, num_modules)
    return keys | {"rope.dimension_count": int(rotated * (1.0 if share is None else share))}


def hunyuan_keys(fields: Fields, num_modules: int) -> Keys:
    width = _number(fields, "moe_intermediate_size")
    return {
        **_usual(fields),
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width * (_optional(fields, "num_shared_experts") or 1),
        "expert_weights_norm": bool(fields.get("route_norm", True)),
        "expert_weights_scale": _real(
            {"router_scaling_factor": 1.0, **fields}, "router_scaling_factor"
        ),
        "expert_gating_func": _SIGMOID,
    }


def step_keys(fields: Fields, num_modules: int) -> Keys:
    """Arrays with one value for each layer, those of the modules behind the trunk's."""
    count = _number(fields, "num_hidden_layers") + num_modules
    theta = fields.get("rope_theta")
    thetas = [*theta, None, None] if isinstance(theta, list) else [theta, None]
    kinds = [*(fields.get("layer_types") or []), *["full_attention"] * count][:count]
    own = fields.get("attention_other_setting") or {}
    heads, groups = _number(fields, "num_attention_heads"), _number(fields, "num_attention_groups")
    slides = [kind == "sliding_attention" for kind in kinds]
    inner = (_optional(own, "num_attention_heads"), _optional(own, "num_attention_groups"))
    layers = str(fields.get("moe_layers_enum") or "").strip()
    firsts = [int(each) for each in layers.split(",") if each.strip().isdecimal()]
    return {
        **_usual({"rms_norm_eps": 1e-5, **fields, "rope_theta": thetas[0]}),
        "rope.freq_base_swa": None if thetas[1] is None else float(thetas[1]),
        "attention.head_count": [inner[0] or heads if each else heads for each in slides],
        "attention.head_count_kv": [inner[1] or groups if each else groups for each in slides],
        "attention.sliding_window": _number(fields, "sliding_window"),
        "attention.sliding_window_pattern": slides,
        "expert_count": _number(fields, "moe_num_experts"),
        "expert_used_count": _number(fields, "moe_top_k"),
        "expert_feed_forward_length": _number(fields, "moe_intermediate_size"),
        "expert_shared_feed_forward_length": _number(fields, "share_expert_dim"),
        "expert_weights_scale": _real(fields, "moe_router_scaling_factor"),
        "expert_weights_norm": fields.get("norm_expert_weight"),
        "leading_dense_block_count": min(firsts, default=0),
        "moe_every_n_layers": _optional(fields, "moe_every_n_layer") or 1,
        "swiglu_clamp_exp": _limits(fields, "swiglu_limits", count),
        "swiglu_clamp_shexp": _limits(fields, "swiglu_limits_shared", count),
    }


def _limits(fields: Fields, name: str, count: int) -> list[float] | None:
    found = fields.get(name)
    if not isinstance(found, list):
        return None
    return [float(each or 0.0) for each in [*found, *[0.0] * count][:count]]
