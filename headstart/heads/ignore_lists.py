"""Lists of modules that a quantised checkpoint leaves unquantised.

Engines ask such a list with their own names: projections fused (`qkv_proj`), the head renumbered
or moved (`model.decoder.`). An unquantised head whose modules are listed only under checkpoint
names is then built as quantised, its weights are skipped, and every draft is rejected. So lists
are written with both.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Iterable
from typing import Any

from headstart.checkpoint.quantized.patterns import matches
from headstart.families.base import Family
from headstart.families.names import Naming

# checkpoint modules -> how engines call them once fused
_FUSED_LOOKUPS = {
    ("q_proj", "k_proj", "v_proj"): ("qkv_proj",),
    ("gate_proj", "up_proj", "w1", "w3"): ("gate_up_proj",),
    ("w2",): ("down_proj",),
    ("q_a_proj", "kv_a_proj_with_mqa"): ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
    ("wq_a", "wkv"): ("fused_wqa_wkv", "wqkv_a"),
}
# quant_method -> the field of quantization_config that holds the list
_LIST_FIELDS = {
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "quark": "exclude",
    "modelopt": "ignore",
}
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")  # no list: settings by module
_REGEX = frozenset("*+?^$()[]{}|\\")  # characters that tell a pattern from a name
_PLAIN = {"bits": 16, "data_type": "float"}  # such a setting


def lookups(
    owner: Family, naming: Naming, modules: Iterable[str], engine: str | None = None
) -> list[str]:
    """All names under which engines (or one engine) may ask for `modules` (our names).

    Names that trunk modules have, too, are left out: SGLang asks for a Qwen3-Next head as if it
    were layer 0, and listing that would leave the real layer 0 unquantised.
    """
    prefixes = [p for e, p in owner.looked_up_as.items() if engine in (None, e)]
    result: dict[str, None] = {}
    for module in modules:
        _, index, rest = module.split(".", 2)
        places = {"module": index, "layer": naming.num_layers + int(index)}
        if engine is None:
            published = owner.keys.to_published(f"{module}.weight", naming)
            result[published.removesuffix(".weight")] = None
            for part, names in owner.also_asked_as.items():
                if f"{rest}.".startswith(f"{part}."):
                    for name in names:
                        result[name.format(**places) + rest.removeprefix(part)] = None
        if rest.startswith("block."):
            for prefix in prefixes:
                at = prefix.format(**places)
                if not _is_of_trunk(at, naming):
                    result[at + rest.removeprefix("block.")] = None
    for name in list(result):
        for fused in fused_lookups(name):
            result[fused] = None
    return list(result)


def _is_of_trunk(prefix: str, naming: Naming) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", prefix)
    return not prefix or (layer is not None and int(layer[1]) < naming.num_layers)


def fused_lookups(name: str) -> list[str]:
    """The fused and collective names that stand for a module in an engine's question."""
    experts = re.fullmatch(r"(.*\.experts)\.\d+\.\w+", name)
    if experts:
        return [experts[1]]
    stem, _, last = name.rpartition(".")
    groups = [fused for parts, fused in _FUSED_LOOKUPS.items() if last in parts]
    return [f"{stem}.{fused}" for group in groups for fused in group]


def list_field(quantization: dict[str, Any]) -> str | None:
    """Where the list of this method lives; GPTQ has rules instead (None)."""
    method = str(quantization.get("quant_method") or "")
    if "ignored_layers" in quantization:  # vLLM reads this one first
        return "ignored_layers"
    return next((f for m, f in _LIST_FIELDS.items() if method.startswith(m)), None)


def has_list(quantization: dict[str, Any]) -> bool:
    """Whether it is known how this method excludes modules."""
    has_settings = _has_rules(quantization) or _has_settings(quantization)
    return has_settings or list_field(quantization) is not None


def _has_rules(quantization: dict[str, Any]) -> bool:
    return str(quantization.get("quant_method")).startswith("gptq")


def _has_settings(quantization: dict[str, Any]) -> bool:
    return quantization.get("quant_method") in _AUTO_ROUND


def with_unquantized(quantization: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A copy of a quantisation config in which `names` are excluded."""
    result = copy.deepcopy(quantization)
    if _has_rules(result):
        result["dynamic"] = rules = result.get("dynamic") or {}  # GPTQModel writes null for none
        for name in names:
            rules.setdefault(_rule(name), {})
        return result
    if _has_settings(result):
        own = result.get("extra_config") or {}
        result["extra_config"] = {**own, **{name: dict(_PLAIN) for name in names}}
        return result
    field = list_field(result)
    if field is None:
        return result
    listed = list(result.get(field) or [])
    result[field] = listed + [name for name in names if name not in set(listed)]
    return result


def without(quantization: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A copy in which `names` are no longer excluded (the head there is quantised now)."""
    result = copy.deepcopy(quantization)
    dropped = set(names)
    field = list_field(result)
    if field and isinstance(result.get(field), list):
        result[field] = [name for name in result[field] if name not in dropped]
    if isinstance(result.get("dynamic"), dict):
        rules = {_rule(name) for name in dropped}
        result["dynamic"] = {k: v for k, v in result["dynamic"].items() if k not in rules}
    if _has_settings(result):
        own = result.get("extra_config") or {}
        result["extra_config"] = {k: v for k, v in own.items() if k not in dropped}
    return result


def _rule(name: str) -> str:
    """GPTQ's way of saying that exactly `name` is not quantised."""
    return f"-:^{re.escape(name)}$"


def is_listed(quantization: dict[str, Any], name: str) -> bool:
    """Whether an engine that asks for `name` has to leave it unquantised."""
    rules = quantization.get("dynamic")
    if isinstance(rules, dict):
        skips = [rule[2:] for rule in rules if rule.startswith("-:")]
        if any(matches(rule, name) for rule in skips):
            return True
    if _has_settings(quantization):
        return _is_set_plain(quantization, name)
    field = list_field(quantization)
    entries = quantization.get(field) if field else None
    if not isinstance(entries, list):
        return False
    method = str(quantization.get("quant_method") or "")
    return any(_entry_covers(method, str(entry), name) for entry in entries)


def _is_set_plain(quantization: dict[str, Any], name: str) -> bool:
    """AutoRound: a setting of 16 bits for the module, or blocks to quantise without it."""
    own = quantization.get("extra_config")
    for key, values in (own if isinstance(own, dict) else {}).items():
        bits = values.get("bits", 16) if isinstance(values, dict) else 0
        is_pattern = bool(_REGEX & set(key)) and matches(f".*(?:{key})", name)
        if key in (name, *fused_lookups(name)) or name.endswith(f".{key}") or is_pattern:
            return isinstance(bits, int) and bits >= 16
    blocks = quantization.get("block_name_to_quantize") or []
    starts = blocks.split(",") if isinstance(blocks, str) else blocks
    return bool(starts) and not any(name.startswith(str(start)) for start in starts)


def _entry_covers(method: str, entry: str, name: str) -> bool:
    if entry == name or entry in fused_lookups(name):
        return True
    if entry.startswith("re:"):
        return matches(entry[3:], name)
    if method == "awq":
        return entry in name
    if method.startswith("modelopt"):
        return entry in name or fnmatch.fnmatch(name, entry)
    return False
