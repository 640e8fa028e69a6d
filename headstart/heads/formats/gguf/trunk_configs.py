"""The published config of a trunk, read back from the keys and tensors of a GGUF file.

One function for each way in which architectures differ; `trunks.py` names them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.heads.formats.gguf.trunk_keys import Keys
from headstart.heads.formats.gguf.trunk_rope import partly_rotated, rotation, wholly_rotated

Config = dict[str, Any]
# keys that say nothing which a config would
_GATING = {1: "softmax", 2: "sigmoid"}


def common(keys: Keys) -> Config:
    """What every architecture has."""
    heads, hidden = keys.each("attention.head_count")[0], keys.number("embedding_length")
    if heads is None or heads < 1:
        raise BadConfig(
            f"{keys.model.folder}: {keys.model.arch_name}.attention.head_count is "
            f"{str(heads)[:40]}; expected a whole number above 0. Convert the model again."
        )
    if keys.get("attention.causal", bool) is False:
        raise UnsupportedFamily(
            f"{keys.model.folder} attends to later tokens, too (attention.causal), which is not "
            "computed here. llama.cpp runs the file."
        )
    embed = keys.model.tensors.get("token_embd.weight")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.num_layers,
        "vocab_size": embed.shape[0] if embed is not None and len(embed.shape) == 2 else 0,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.each("attention.head_count_kv", heads)[0],
        "head_dim": keys.number("attention.key_length", hidden // heads),
        "intermediate_size": keys.each("feed_forward_length")[0],
        "max_position_embeddings": keys.number("context_length", 2048),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in keys.model.tensors,
        "hidden_act": "silu",
    }
    width = keys.number("attention.value_length", config["head_dim"])
    if width != config["head_dim"]:
        config["v_head_dim"] = width
    return config | rotation(keys)


def llama_config(keys: Keys) -> Config:
    config = common(keys)
    if keys.get("expert_count"):
        raise UnsupportedFamily(
            f"{keys.model.folder} is a llama model with experts (Mixtral), which the engine does "
            "not run. llama.cpp does."
        )
    keys.get("expert_used_count")
    return config | wholly_rotated(keys, config) | {
        "attention_bias": keys.any_has("attn_q.bias"),
        "mlp_bias": keys.any_has("ffn_gate.bias"),
    }  # fmt: skip


def qwen_config(keys: Keys) -> Config:
    config = common(keys)
    return config | wholly_rotated(keys, config)


def hybrid_config(keys: Keys) -> Config:
    """Qwen3-Next and Qwen3.5: some layers keep a state."""
    config = common(keys)
    heads = keys.number("ssm.time_step_rank")
    often = keys.number("full_attention_interval", 4)
    kinds = keys.each("attention.recurrent_layers", kind=bool)
    if kinds[0] is None:
        kinds = [bool((layer + 1) % often) for layer in range(keys.num_layers)]
    keys.get("rope.dimension_sections", list)  # of images' positions; a text's three are the same
    return config | partly_rotated(keys, config) | _experts(keys) | {
        "layer_types": [
            "linear_attention" if kind else "full_attention" for kind in kinds[: keys.num_layers]
        ],
        "full_attention_interval": often,
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_value_head_dim": keys.number("ssm.inner_size") // max(heads, 1),
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
        "mlp_only_layers": keys.layers_with("ffn_gate.weight"),
        "attn_output_gate": True,
    }  # fmt: skip


def _experts(keys: Keys) -> Config:
    """Sizes and routing of experts, where there are any."""
    count = keys.get("expert_count")
    kind = keys.get("expert_gating_func")
    found: Config = {
        "num_experts_per_tok": keys.get("expert_used_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.get("expert_shared_count"),
        "n_group": keys.get("expert_group_count"),
        "topk_group": keys.get("expert_group_used_count"),
        "routed_scaling_factor": keys.get("expert_weights_scale", float),
    }
    norm = keys.get("expert_weights_norm", bool)
    if not count:
        return {}
    if kind is not None and kind not in _GATING:
        raise UnsupportedFamily(
            f"{keys.model.folder}: expert_gating_func is {str(kind)[:20]}; expected "
            f"{' or '.join(_GATING.values())}. llama.cpp runs the file."
        )
    found |= {
        "num_experts": count, "n_routed_experts": count,
        "scoring_func": _GATING.get(kind) if kind is not None else None,
        "norm_topk_prob": norm,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def glm_config(keys: Keys) -> Config:
    config = common(keys)
    return config | partly_rotated(keys, config) | _experts(keys) | {
        "norm_topk_prob": bool(keys.get("expert_weights_norm", bool)),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "attention_bias": keys.any_has("attn_q.bias"),
        "use_qk_norm": keys.any_has("attn_q_norm.weight"),
    }  # fmt: skip


def latent_config(keys: Keys) -> Config:
    """Latent attention, which is stored as one shared key head of the latent's width."""
    config = common(keys)
    rotated = keys.number("rope.dimension_count")
    width = keys.number("attention.key_length_mla")
    config |= _experts(keys) | {
        "num_key_value_heads": config["num_attention_heads"],
        "norm_topk_prob": bool(keys.get("expert_weights_norm", bool)),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": keys.number("attention.value_length_mla"),
        "head_dim": width,
    }
    if config.get("scoring_func") != "sigmoid":
        raise UnsupportedFamily(
            f"{keys.model.folder} is a deepseek2 model whose experts are not chosen by sigmoids "
            "(DeepSeek-V2 and its kind), which the engine does not run. llama.cpp does."
        )
    return config


def sparse_config(keys: Keys) -> Config:
    """The same with indexers, which say what a layer attends to."""
    kinds = keys.listed("attention.indexer.types", bool)
    names = {True: "full", False: "shared"}
    own = keys.layers_with("indexer.attn_k.weight")
    kinds = kinds or [layer in own for layer in range(keys.num_layers)]
    return latent_config(keys) | {
        "index_n_heads": keys.number("attention.indexer.head_count"),
        "index_head_dim": keys.number("attention.indexer.key_length"),
        "index_topk": keys.number("attention.indexer.top_k"),
        "indexer_types": [names[bool(kind)] for kind in kinds[: keys.num_layers]],
    }


def ernie_config(keys: Keys) -> Config:
    config = common(keys)
    experts = _experts(keys)
    last = max(keys.layers_with("ffn_gate_exps.weight"), default=-1)
    return config | wholly_rotated(keys, config) | {
        "moe_num_experts": experts.get("num_experts"),
        "moe_k": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": experts.get("moe_intermediate_size"),
        "moe_num_shared_experts": experts.get("n_shared_experts", 0),
        "moe_layer_start_index": keys.number("leading_dense_block_count", 0),
        "moe_layer_end_index": last,
        "moe_layer_interval": keys.number("interleave_moe_layer_step", 1),
        "use_bias": False,
    }  # fmt: skip


def step_config(keys: Keys) -> Config:
    """Layers that slide have their own number of heads and rotate all of them."""
    config = common(keys)
    if config["rope_parameters"]["rope_type"] != "default":
        raise UnsupportedFamily(
            f"{keys.model.folder}: rotation of {keys.model.arch_name} is scaled, which is not read "
            "from GGUF here. llama.cpp runs the file."
        )
    slides = keys.each("attention.sliding_window_pattern", False, bool)
    heads, groups = keys.each("attention.head_count"), keys.each("attention.head_count_kv")
    usual, other = _first(slides, False), _first(slides, True)
    theta = config.pop("rope_theta")
    inner = keys.get("rope.freq_base_swa", float) or theta
    experts = _experts(keys)
    keys.number("moe_every_n_layers", 1)
    keys.number("leading_dense_block_count", 0)
    config.pop("rope_parameters")
    limits = {
        "swiglu_limits": keys.listed("swiglu_clamp_exp", float),
        "swiglu_limits_shared": keys.listed("swiglu_clamp_shexp", float),
    }
    return config | {name: value for name, value in limits.items() if value} | {
        "num_attention_heads": heads[usual],
        "num_attention_groups": groups[usual],
        "num_key_value_heads": groups[usual],
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": heads[other],
            "num_attention_groups": groups[other], "head_dim": config["head_dim"],
        },
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_theta": [inner if each else theta for each in slides],
        "partial_rotary_factors": [1.0 if each else 0.5 for each in slides],
        "sliding_window": keys.number("attention.sliding_window"),
        "use_head_wise_attn_gate": keys.any_has("attn_gate.weight"),
        "moe_num_experts": experts.get("num_experts"),
        "moe_top_k": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": experts.get("moe_intermediate_size"),
        "share_expert_dim": experts.get("shared_expert_intermediate_size"),
        "moe_router_scaling_factor": experts.get("routed_scaling_factor", 1.0),
        "norm_expert_weight": experts.get("norm_topk_prob", True),
        "moe_layers_enum": ",".join(map(str, keys.layers_with("ffn_gate_exps.weight"))),
    }  # fmt: skip


def _first(values: list[Any], wanted: bool) -> int:
    """The first place of a layer of that kind; of any, where there is none."""
    return next((place for place, value in enumerate(values) if bool(value) == wanted), 0)


def mimo_config(keys: Keys) -> Config:
    """MiMo-V2-Flash: layers that slide have their own K/V heads and rotation."""
    config = common(keys)
    pattern = [int(each) for each in keys.each("attention.sliding_window_pattern", False, bool)]
    groups = keys.each("attention.head_count_kv")
    usual, other = _first(pattern, False), _first(pattern, True)
    width = config.get("v_head_dim", config["head_dim"])
    moe = keys.layers_with("ffn_gate_exps.weight")
    return config | partly_rotated(keys, config) | _experts(keys) | {
        "layernorm_epsilon": config["rms_norm_eps"],
        "num_key_value_heads": groups[usual],
        "v_head_dim": width,
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": groups[other],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": width,
        "swa_rope_theta": keys.get("rope.freq_base_swa", float) or config["rope_theta"],
        "sliding_window_size": keys.number("attention.sliding_window"),
        "sliding_window": keys.number("attention.sliding_window"),
        "attention_value_scale": keys.get("attention.value_scale", float),
        "add_swa_attention_sink_bias": keys.any_has("attn_sinks.weight"),
        "hybrid_layer_pattern": pattern[: keys.num_layers],
        "moe_layer_freq": [int(layer in moe) for layer in range(keys.num_layers)],
        "n_shared_experts": 0,
    }  # fmt: skip


ConfigOf = Callable[[Keys], Config]
