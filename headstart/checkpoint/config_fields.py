"""Types and limits of every config field that anything here reads: one table.

Configs come with downloads. Family tables and models take a field's type for granted, because
whatever is read from disk passed `check_fields` first. A field that is null or absent is left to
its readers. Objects inside of a config are checked by the same table, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import BadConfig


@dataclass(frozen=True)
class Kind:
    """What a value may be, in words and as a check."""

    words: str
    fits: Callable[[Any], bool]


def _whole(low: int, most: int) -> Kind:
    return Kind(
        f"a whole number from {low} to {most}",
        lambda value: type(value) is int and low <= value <= most,
    )


def _list(of: Kind, words: str) -> Kind:
    return Kind(
        f"a list of {words}",
        lambda value: isinstance(value, list) and all(map(of.fits, value)),
    )


def _either(*kinds: Kind) -> Kind:
    return Kind(
        " or ".join(kind.words for kind in kinds),
        lambda value: any(kind.fits(value) for kind in kinds),
    )


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return abs(value) < 1e30 and math.isfinite(value)


# Largest sensible values: counts are walked one by one, so a corrupted one must not be believed.
SIZE, HEAD_SIZE, POSITIONS = _whole(0, 2**31), _whole(0, 2**16), _whole(0, 2**40)
LAYERS, EXPERTS, MODULES = _whole(0, 10_000), _whole(0, 10_000), _whole(0, 64)
NUMBER = Kind("a number", _is_number)
NOT_NEGATIVE = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TEXTS = _list(TEXT, "strings")
_NULL = Kind("null", lambda value: value is None)
_PER_LAYER = _list(_either(SIZE, _NULL), "whole numbers, one per layer")
_TOKENS = _either(_whole(-1, 2**31), _list(_whole(-1, 2**31), "token ids"))
_NUMBERS = _list(_either(NUMBER, _NULL), "numbers")
_EMPTY = Kind('""', lambda value: value == "")


# How many modules a head has, as families call it.
COUNT_FIELDS = (
    "mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers",
)  # fmt: skip


def _table(*groups: tuple[Kind, str]) -> dict[str, Kind]:
    return {name: kind for kind, names in groups for name in names.split()}


KINDS = _table(
    # A list is legal where a model gives one value per layer (Step-3.5, some pruned models).
    (_either(SIZE, _PER_LAYER), """
        hidden_size vocab_size num_attention_heads num_key_value_heads num_attention_groups
        intermediate_size moe_intermediate_size
        expert_ffn_hidden_size expert_hidden_dim n_shared_experts moe_num_shared_experts
        num_shared_experts shared_expert_intermediate_size moe_shared_expert_intermediate_size
        share_expert_dim q_lora_rank kv_lora_rank index_n_heads index_topk
        moe_latent_size o_lora_rank o_groups hc_mult
        swa_num_attention_heads swa_num_key_value_heads linear_num_key_heads linear_num_value_heads
        mamba_num_heads n_groups ssm_state_size ffn_hidden_size
        swa_q_lora_rank swa_kv_lora_rank indexer_n_heads indexer_kv_heads index_kpool
        num_noise_heads param_sink_number hc_count hc_lowrank linear_num_heads
        mhc_num_stream
    """),
    (SIZE, """
        num_experts_per_tok moe_k moe_top_k n_group topk_group sliding_window sliding_window_size
        ple_embed_dim rotary_dim
    """),
    (_either(HEAD_SIZE, _PER_LAYER), """
        head_dim attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim
        swa_head_dim swa_v_head_dim linear_key_head_dim linear_value_head_dim
        linear_conv_kernel_dim conv_kernel mamba_head_dim indexer_head_dim linear_head_dim
        ple_conv_kernel_size short_conv_kernel_size swa_qk_nope_head_dim swa_qk_rope_head_dim
    """),
    (_either(EXPERTS, _PER_LAYER), """
        n_routed_experts num_experts num_local_experts moe_num_experts mtp_num_experts
        mtp_n_routed_experts
    """),
    (MODULES, " ".join(COUNT_FIELDS)),
    (LAYERS, """
        num_hidden_layers first_k_dense_replace moe_layer_start_index moe_layer_interval
        full_attention_interval decoder_sparse_step max_window_layers index_topk_freq
        index_skip_topk_offset layer_group_size num_hash_layers
    """),
    (_whole(-1, 10_000), "moe_layer_end_index"),  # -1: up to the last layer
    (_whole(1, 2**31), "ngram_vocab_size_base make_ngram_vocab_size_divisible_by"),
    (_whole(2, 16), "ngram_size"),
    (_whole(1, 64), "heads_per_ngram"),
    (_whole(1, 10_000), "split_ngram_parts"),
    (_whole(0, 1000), "hc_sinkhorn_iters mhc_recur_norm"),
    (POSITIONS, "max_position_embeddings original_max_position_embeddings"),
    (_either(NOT_NEGATIVE, _NUMBERS), "rope_theta partial_rotary_factors"),
    (NOT_NEGATIVE, """
        compress_rope_theta
        rms_norm_eps layernorm_epsilon layer_norm_epsilon swa_rope_theta partial_rotary_factor
        swa_partial_rotary_factor routed_scaling_factor moe_router_scaling_factor
        attention_value_scale moe_norm_min factor low_freq_factor high_freq_factor beta_fast
        beta_slow mscale mscale_all_dim attention_factor hc_eps hc_magnitude
    """),
    (NUMBER, "swiglu_limit linear_lower_bound gate_lower_bound kda_lower_bound"),
    (_NUMBERS, """
        swiglu_limits swiglu_limits_shared expert_swiglu_limit_list share_expert_swiglu_limit_list
    """),
    (FLAG, """
        tie_word_embeddings attention_bias mlp_bias use_qk_norm use_sliding_window norm_topk_prob
        norm_expert_weight rope_interleave indexer_rope_interleave use_head_wise_attn_gate
        attn_output_gate add_swa_attention_sink_bias add_full_attention_sink_bias
        index_share_for_mtp_iteration mtp_use_dedicated_embeddings truncate
        chain_hidden_post_norm use_bias enable_ihc gated_mla learnable_sink
        index_kpool_always_select_tail safe_gate zero_centered use_rmsnorm use_qkv_bias norm_head
        moe_router_enable_expert_bias
    """),
    (TEXT, """
        model_type hybrid_override_pattern mtp_hybrid_override_pattern hidden_act scoring_func
        moe_router_activation topk_method swa_attention_gate_type torch_dtype dtype rope_type
        quant_method speculators_model_type norm_type layernorm_type type
        gated_attention_proj_granularity_type attention_projection_layout gating_type score_function
    """),
    (_either(TEXT, _list(LAYERS, "layer numbers")), "moe_layers_enum"),
    (_either(TEXT, TEXTS), "mtp_layer_types index_topk_pattern"),
    (TEXTS, """
        architectures layer_types layers_block_type mtp_layers_block_type mlp_layer_types
        indexer_types mtp_mlp_layer_types
    """),
    (_list(SIZE, "whole numbers, one per layer"), "compress_ratios"),
    (SIZE, "compressed_sparse_attention heavily_compressed_attention"),  # of compress_rates
    (_list(LAYERS, "layer numbers"), "mlp_only_layers mtp_local_layer_ids ple_layer_ids"),
    (_either(LAYERS, _list(_either(LAYERS, FLAG), "whole numbers")), "moe_layer_freq"),
    (_list(_either(LAYERS, FLAG), "whole numbers"), "hybrid_layer_pattern"),
    (OBJECT, """
        text_config llm_config mtp_config attention_other_setting rope_parameters rope_scaling
        linear_attn_config compress_rates trunk_config transformer_layer_config speculators_config
        auto_map
    """),
    (_either(OBJECT, _EMPTY), "quantization_config compression_config"),  # xLLM writes ""
    (_TOKENS, "eos_token_id bos_token_id pad_token_id"),
)  # fmt: skip
# Lists of modules in quantisation configs; what ModelOpt's own file calls it comes last.
QUANTIZATION = _table(
    (TEXT, "quant_method"),
    (TEXTS, "ignore modules_to_not_convert exclude ignored_layers exclude_modules"),
    (OBJECT, "dynamic"),
)
# What generation_config.json says of sampling; SamplingParams has the limits.
SAMPLING = _table(
    (NUMBER, "temperature top_p min_p repetition_penalty"),
    (_whole(-1, 2**31), "top_k"),
    (FLAG, "do_sample"),
    (_TOKENS, "eos_token_id"),
)
_INSIDE = ("text_config", "llm_config", "mtp_config", "attention_other_setting", "rope_parameters",
           "rope_scaling", "linear_attn_config", "compress_rates", "mtp")  # fmt: skip
_QUANTIZED = ("quantization_config", "compression_config")
_ONE_PER_LAYER = ("moe_layer_freq", "hybrid_layer_pattern")
# rotation by the kind of a layer
_OF_ROPES = ("full_attention", "sliding_attention", "main", "compress")


def check_fields(path: Path, part: dict[str, Any], prefix: str = "") -> None:
    """BadConfig for the first field of a config, or of objects in it, that is of another kind.

    `prefix` says where in `path` the config lies, for messages (`trunk_config.`).
    """
    check_kinds(path, part, KINDS, prefix)
    for name in _QUANTIZED:
        if isinstance(part.get(name), dict):
            check_kinds(path, part[name], QUANTIZATION, f"{prefix}{name}.")
    for name in _ONE_PER_LAYER:
        value, layers = part.get(name), part.get("num_hidden_layers") or 0
        if isinstance(value, list) and len(value) < layers:
            raise _wrong(path, prefix + name, value, f"one entry for each of {layers} layers")
    for name in (*_INSIDE, *_ropes_in(prefix)):
        if isinstance(part.get(name), dict):
            check_fields(path, part[name], f"{prefix}{name}.")


def _ropes_in(prefix: str) -> Iterable[str]:
    return _OF_ROPES if prefix.endswith("rope_parameters.") else ()


def check_kinds(path: Path, part: dict[str, Any], kinds: dict[str, Kind], prefix: str = "") -> None:
    """BadConfig for the first field that the table lists and that is of another kind."""
    for name, value in part.items():
        kind = kinds.get(name)
        if value is not None and kind is not None and not kind.fits(value):
            raise _wrong(path, prefix + name, value, kind.words)


def _wrong(path: Path, field: str, value: Any, expected: str) -> BadConfig:
    shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
    return BadConfig(f"{path}: {field} is {shown}; expected {expected}. Correct the field.")
