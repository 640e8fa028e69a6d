"""Sizes of a model by one set of names, whatever its config calls them.

Shapes in the family tables are written with these names (`heads*head_dim`). A size that the config
does not give is left out, and shapes that need it are then not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

Fields = Mapping[str, Any]

# our name -> the config fields (or dotted paths) that hold it, first present wins
FIELDS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_groups", "num_attention_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "v_dim": ("v_head_dim", "head_dim", "attention_head_dim"),
    "intermediate": ("intermediate_size",),
    "experts": (
        "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts",
    ),
    "moe_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_dim"),
    "shared_experts": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
    "shared_width": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "index_heads": ("index_n_heads", "indexer_n_heads"),
    "index_dim": ("index_head_dim", "indexer_head_dim"),
    "index_kv": ("indexer_kv_heads",),
    "kpool": ("index_kpool",),
    "noise_heads": ("num_noise_heads",),
    "sinks": ("param_sink_number",),
    "latent": ("moe_latent_size",),
    "o_rank": ("o_lora_rank",),
    "o_groups": ("o_groups",),
    "hc": ("hc_mult", "hc_count", "mhc_num_stream"),
    "hc_rank": ("hc_lowrank",),
    "ple_dim": ("ple_embed_dim",),
    "ple_conv": ("ple_conv_kernel_size",),
    "top_k": ("num_experts_per_tok", "moe_k", "moe_top_k"),
    "ngram_shards": ("split_ngram_parts",),
    "swa_heads": ("swa_num_attention_heads", "attention_other_setting.num_attention_heads"),
    "swa_kv_heads": ("swa_num_key_value_heads", "attention_other_setting.num_attention_groups"),
    "swa_head_dim": ("swa_head_dim", "attention_other_setting.head_dim"),
    "swa_v_dim": ("swa_v_head_dim",),
    "lin_k_heads": ("linear_num_key_heads",),
    "lin_v_heads": ("linear_num_value_heads",),
    "lin_k_dim": ("linear_key_head_dim",),
    "lin_v_dim": ("linear_value_head_dim",),
    "kda_heads": ("linear_num_heads",),
    "kda_dim": ("linear_head_dim",),
    "conv": ("linear_conv_kernel_dim", "conv_kernel", "short_conv_kernel_size"),
    "mamba_heads": ("mamba_num_heads",),
    "mamba_dim": ("mamba_head_dim",),
    "groups": ("n_groups",),
    "state": ("ssm_state_size",),
}  # fmt: skip


def dims(fields: Fields) -> dict[str, int]:
    """Every size that `fields` (the text part of a config over its top level) gives."""
    found: dict[str, int] = {}
    for name, candidates in FIELDS.items():
        for field in candidates:
            value = at(fields, field)
            if type(value) is int:
                found[name] = value
                break
    if "head_dim" not in found and found.get("heads") and "hidden" in found:
        found["head_dim"] = found["hidden"] // found["heads"]
    if "head_dim" in found:
        found.setdefault("v_dim", found["head_dim"])
    if "nope_dim" not in found and "rope_dim" in found and "head_dim" in found:
        found["nope_dim"] = found["head_dim"] - found["rope_dim"]
    if "noise_heads" in found and "heads" in found:
        found["signal_heads"] = found["heads"] - found["noise_heads"]
    if "shared_width" not in found and "moe_width" in found:
        found["shared_width"] = found["moe_width"] * found.get("shared_experts", 1)
    if found.get("o_groups") and "heads" in found:
        found["heads_per_group"] = found["heads"] // found["o_groups"]
    # A size of 0 means that there is no such part: shapes that name it are not checked. Only
    # rope_dim is a part of sums, and 0 in models that rotate nothing (GLM-5.3-Flash).
    return {n: value for n, value in found.items() if value >= (0 if n == "rope_dim" else 1)}


def at(fields: Fields, path: str) -> Any:
    """The value at a dotted path of a config, or None."""
    value: Any = fields
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def positive_ints(fields: Fields, names: Iterable[str]) -> tuple[int, ...] | None:
    """The values of fields; None where one is no whole number above 0."""
    values = [fields.get(name) for name in names]
    found = tuple(value for value in values if type(value) is int and value > 0)
    return found if len(found) == len(values) else None


def number(fields: Fields, name: str, default: float) -> float:
    """The value of a field; `default` where it is absent or null."""
    value = fields.get(name)
    return default if value is None else float(value)


def layer_numbers(listed: Any) -> set[int]:
    """Of a list, or of a text with commas; anything else in it is passed over."""
    each = listed if isinstance(listed, list) else str(listed or "").split(",")
    return {int(number) for number in map(str, each) if number.strip().isdecimal()}


def size(expression: str, known: Mapping[str, int]) -> int | None:
    """The value of an expression such as `2*heads+rope_dim`, or None if a name is unknown."""
    total = 0
    for term in expression.split("+"):
        factors = []
        for factor in term.split("*"):
            if factor.isdigit():
                factors.append(int(factor))
            elif factor in known:
                factors.append(known[factor])
            else:
                return None
        total += prod(factors)
    return total
