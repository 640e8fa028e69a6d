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

from headstart.families.base import Family, Naming

_FUSED_LOOKUPS = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
    ("wq_a", "wkv"): "fused_wqa_wkv",
}
# quant_method -> the field of quantization_config that holds the list
_LIST_FIELDS = {
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "quark": "exclude",
    "modelopt": "ignore",
}


def lookups(owner: Family, naming: Naming, modules: Iterable[str]) -> list[str]:
    """All names under which engines may ask for the unquantised `modules` (our names)."""
    result: dict[str, None] = {}
    for module in modules:
        published = owner.keys.to_published(f"{module}.weight", naming).removesuffix(".weight")
        result[published] = None
        _, index, rest = module.split(".", 2)
        if rest.startswith("block."):
            for prefix in owner.looked_up_as.values():
                layer = naming.num_layers + int(index)
                at = prefix.format(module=index, layer=layer)
                result[at + rest.removeprefix("block.")] = None
    for name in list(result):
        for fused in fused_lookups(name):
            result[fused] = None
    return list(result)


def fused_lookups(name: str) -> list[str]:
    """The fused and collective names that stand for a module in an engine's question."""
    stem, _, last = name.rpartition(".")
    found = [f"{stem}.{fused}" for parts, fused in _FUSED_LOOKUPS.items() if last in parts]
    experts = re.fullmatch(r"(.*\.experts)\.\d+\.\w+", name)
    return [experts[1]] if experts else found


def list_field(quantization: dict[str, Any]) -> str | None:
    """Where the list of this method lives; GPTQ has rules instead (None)."""
    method = str(quantization.get("quant_method") or "")
    if "ignored_layers" in quantization:  # vLLM reads this one first
        return "ignored_layers"
    return next((f for m, f in _LIST_FIELDS.items() if method.startswith(m)), None)


def with_unquantized(quantization: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A copy of a quantisation config in which `names` are excluded."""
    result = copy.deepcopy(quantization)
    if str(result.get("quant_method")).startswith("gptq"):
        rules = result.setdefault("dynamic", {})
        for name in names:
            rules.setdefault(f"-:^{re.escape(name)}$", {})
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
    return result


def is_listed(quantization: dict[str, Any], name: str) -> bool:
    """Whether an engine that asks for `name` is told to leave it unquantised."""
    rules = quantization.get("dynamic")
    if isinstance(rules, dict):
        skips = [rule[2:] for rule in rules if rule.startswith("-:")]
        if any(_matches(rule, name) for rule in skips):
            return True
    field = list_field(quantization)
    entries = quantization.get(field) if field else None
    if not isinstance(entries, list):
        return False
    method = str(quantization.get("quant_method") or "")
    return any(_entry_covers(method, str(entry), name) for entry in entries)


def _entry_covers(method: str, entry: str, name: str) -> bool:
    if entry == name or entry in fused_lookups(name):
        return True
    if entry.startswith("re:"):
        return _matches(entry[3:], name)
    if method == "awq":
        return entry in name
    if method.startswith("modelopt"):
        return entry in name or fnmatch.fnmatch(name, entry)
    return False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False
