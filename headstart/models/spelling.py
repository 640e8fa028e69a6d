"""One spelling for published configs: what a class takes where a config is silent, fields that
families call differently, and model types that do not run here, with what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import UnsupportedFamily
from headstart.families.registry import match_family
from headstart.families.running import lacking
from headstart.models.delta_config import SILENT as _DELTA

_HYBRID: dict[str, Any] = {
    **_DELTA,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "use_qk_norm": True,
}
_LATENT: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "n_shared_experts": 1,
}
_DEEPSEEK: dict[str, Any] = {
    **_LATENT,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_STEP: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "max_position_embeddings": 128000,
}
# model_type -> what its published class takes where a config does not say
_SILENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {},
    "mimo": {"attention_bias": True},
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
        "moe_num_shared_experts": 2,
    },
    "deepseek_v3": {**_DEEPSEEK, "max_position_embeddings": 4096},
    "deepseek_v32": {**_DEEPSEEK, "max_position_embeddings": 163840},
    "glm_moe_dsa": {
        **_LATENT,
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 202752,
        "indexer_rope_interleave": True,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
    },
    "qwen3_next": _HYBRID,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _HYBRID),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _HYBRID),
    "mimo_v2_flash": {
        "scoring_func": "sigmoid",
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000.0,
        "swa_rope_theta": 10000.0,
        "sliding_window_size": 128,
        "n_shared_experts": 0,
        "layernorm_epsilon": 1e-5,
    },
    **dict.fromkeys(("step3p5", "step3p7"), _STEP),
}
RUN_TYPES = tuple(_SILENT)
# what a family calls a field -> what we read; the first counts
_STEP_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_top_k": "num_experts_per_tok",
    "moe_router_activation": "scoring_func",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "norm_expert_weight": "norm_topk_prob",
}
_RENAMED: dict[str, dict[str, str]] = {
    "mimo_v2_flash": {"layernorm_epsilon": "rms_norm_eps"},
    **dict.fromkeys(("step3p5", "step3p7"), _STEP_NAMES),
}


def spelled(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that runs here, or UnsupportedFamily with what is in the way."""
    kind = str(raw.get("model_type"))
    if kind not in RUN_TYPES:
        owner = match_family(raw, (kind,), ())
        lacks = "" if owner is None else f" It would need {lacking(owner.name)}."
        raise UnsupportedFamily(
            f"the embedded engine does not run model_type {kind!r}; it runs "
            f"{', '.join(RUN_TYPES)}.{lacks} `headstart launch` has commands for other engines, "
            "and files are handled all the same."
        )
    silent = {name: value for name, value in _SILENT[kind].items() if raw.get(name) is None}
    fields = {**raw, **silent}
    for theirs, ours in _RENAMED.get(kind, {}).items():
        if fields.get(theirs) is not None:
            fields[ours] = fields[theirs]
    if kind == "mimo_v2_flash":
        _spell_mimo_v2(fields)
    elif kind.startswith("step3p"):
        _spell_step(fields)
    _refuse(kind, fields)
    return fields


def _spell_mimo_v2(fields: dict[str, Any]) -> None:
    """What transformers writes for a release: layers by name, sliding heads by rule."""
    by_layer = {"hybrid_layer_pattern": "layer_types", "moe_layer_freq": "mlp_layer_types"}
    for ours, theirs in by_layer.items():
        named = fields.get(theirs)
        if fields.get(ours) is None and isinstance(named, list):
            fields[ours] = [int(name in ("sliding_attention", "sparse")) for name in named]
    rope = fields.get("rope_parameters") or {}
    if "sliding_attention" in rope and "full_attention" in rope:
        fields["swa_rope_theta"] = rope["sliding_attention"].get("rope_theta")
        fields["rope_parameters"] = rope["full_attention"]
    for name, times in (
        ("num_attention_heads", 1), ("num_key_value_heads", 2), ("head_dim", 1), ("v_head_dim", 1),
    ):  # fmt: skip
        value = fields.get(name)
        if fields.get(f"swa_{name}") is None and isinstance(value, int):
            fields[f"swa_{name}"] = times * value
    fields["swa_partial_rotary_factor"] = fields["partial_rotary_factor"]
    # as SGLang and transformers count: so many before the row, and the row
    fields["swa_window"] = fields["sliding_window_size"] + 1


def _spell_step(fields: dict[str, Any]) -> None:
    """Rotation is given layer by layer, and the heads of sliding layers apart."""
    kinds = fields.get("layer_types") or []
    of_modules = set(kinds[int(fields.get("num_hidden_layers") or 0) :])
    if len(of_modules) > 1:
        raise UnsupportedFamily(
            f"the head's modules are {' and '.join(sorted(of_modules))}; the engine runs heads "
            "whose modules are all of one kind, as those of all releases are."
        )
    given = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
    for theirs, ours in given.items():
        value = fields.get(theirs)
        if isinstance(value, list):
            by_kind = dict(zip(reversed(kinds), reversed(value), strict=False))
            fields[ours] = by_kind.get("full_attention")
            fields[f"swa_{ours}"] = by_kind.get("sliding_attention")
        else:
            fields[f"swa_{ours}"] = value
    other = fields.get("attention_other_setting") or {}
    for name in ("num_attention_heads", "num_attention_groups", "head_dim"):
        ours = _STEP_NAMES.get(name, name)
        fields[f"swa_{ours}"] = other.get(name) or fields.get(ours)
    fields["swa_v_head_dim"] = fields["swa_head_dim"]
    fields["swa_window"] = fields.get("sliding_window")


def _refuse(kind: str, fields: Mapping[str, Any]) -> None:
    """What a model asks for and nobody computes here."""
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedFamily(f"hidden_act is {activation!r}; the engine computes silu only.")
    if fields.get("use_bias"):
        raise UnsupportedFamily(
            "use_bias is true; the engine computes ERNIE without biases, as all its releases are."
        )
    if kind == "mimo_v2_flash":
        for name in ("attention_bias", "add_full_attention_sink_bias"):
            if fields.get(name):
                raise UnsupportedFamily(
                    f"{name} is true; the engine computes MiMo-V2 without, as its releases are."
                )
