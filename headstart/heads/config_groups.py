"""Groups of a config of compressed-tensors that describe a head's quantised modules alone.

A head that is quantised otherwise than its model, or in a model that is not quantised at all, is
described by groups of its own. Their targets are all names under which engines ask for its modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.quantized.described import group_of
from headstart.checkpoint.quantized.names import PACKED, is_quantized, is_scale
from headstart.families.experts import is_fused_experts, split_name
from headstart.families.names import Naming
from headstart.heads.head import Head, own_quantization
from headstart.heads.ignore_lists import lookups

_MIXED = "mixed-precision"


def own_groups(
    head: Head, naming: Naming | None = None
) -> tuple[dict[str, dict[str, Any]], str] | None:
    """Groups of compressed-tensors for a head's quantised modules alone, and their format.

    None where the head is described in another way.
    """
    quantization = own_quantization(head)
    if quantization.get("quant_method") != "compressed-tensors":
        return None
    naming = head.naming() if naming is None else naming
    alike: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for module in modules_of(head)[1]:
        published = head.family.keys.to_published(f"{module}.weight", head.naming())
        group = group_of(published.removesuffix(".weight"), quantization)
        own = {"format": quantization.get("format"), **group}
        if not isinstance(own.get("weights"), dict) or own["format"] is None:
            return None
        same = {key: value for key, value in own.items() if key != "targets"}
        alike.setdefault(json.dumps(same, sort_keys=True), (same, []))[1].append(module)
    groups = {
        f"head_{number}": {"targets": lookups(head.family, naming, modules), **group}
        for number, (group, modules) in enumerate(alike.values())
    }
    formats = {str(group["format"]) for group in groups.values()}
    return (groups, formats.pop() if len(formats) == 1 else _MIXED) if groups else None


def with_groups(head: Head, naming: Naming, quantization: dict[str, Any]) -> dict[str, Any]:
    """The model's config of compressed-tensors with groups for a head that is stored otherwise."""
    found = own_groups(head, naming) if head.is_quantized else None
    if found is None or quantization.get("quant_method") != "compressed-tensors":
        return quantization
    groups, form = found
    model_groups = quantization.get("config_groups")
    model_groups = model_groups if isinstance(model_groups, dict) else {}
    model_groups = {name: group for name, group in model_groups.items() if name not in groups}
    bare = {**quantization, "config_groups": model_groups}
    if all(_is_described(group, bare) for group in groups.values()):
        return bare
    own = quantization.get("format")
    formats = {name: {"format": own, **group} for name, group in model_groups.items()}
    # The head's come first: a pattern among the model's targets may cover its names, too.
    return {
        **quantization, "format": own if own == form else _MIXED,
        "config_groups": {**groups, **formats},
    }  # fmt: skip


def _is_described(group: Mapping[str, Any], quantization: dict[str, Any]) -> bool:
    """Whether a config says of all targets of a group what the group says."""
    for target in group["targets"]:
        found = group_of(target, quantization)
        form = found.get("format") or quantization.get("format")
        parts = ("weights", "input_activations")
        if form != group["format"] or any(found.get(part) != group.get(part) for part in parts):
            return False
    return True


def trunk_patterns(head: Head, naming: Naming) -> list[str]:
    """Everything but the head, as an ignore list says it."""
    trunk, layers = head.family.trunk, range(naming.num_layers)
    numbers = "|".join(map(str, layers))
    result = [name.removesuffix(".weight") for name in trunk.lm_heads]
    for prefix in trunk.prefixes:
        start = re.escape(prefix + trunk.layer.partition("{layer}")[0])
        result.append(f"re:{start}({numbers})\\..*")
    return [*result, *(f"re:{re.escape(prefix)}.*" for prefix in trunk.beside)]


def modules_of(head: Head) -> tuple[list[str], list[str]]:
    """The linear modules of a head under our names: those stored plain, those quantised."""
    plain: list[str] = []
    quantized: list[str] = []
    for name, source in head.tensors.items():
        module, _, parameter = name.rpartition(".")
        if is_scale(name) or name.split(".")[2] in ("embed_tokens", "lm_head"):
            continue
        found = quantized if is_quantized(name, source) else plain
        if is_fused_experts(name):
            kinds = ("down",) if parameter == "down_proj" else ("gate", "up")
            found += [
                split_name(name, expert, kind).removesuffix(".weight")
                for expert in range(source.shape[0])
                for kind in kinds
            ]
        elif parameter in PACKED and (len(source.shape) == 2 or parameter != "weight"):
            found.append(module)
    return plain, quantized
