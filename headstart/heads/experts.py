"""Moves a head's experts between one tensor each and one fused tensor, without touching a value.

Fusing is concatenation of stored bytes and splitting is cutting them, because gate rows precede
up rows and experts follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping

from headstart.checkpoint.source import TensorSource, concatenated, reshaped, rows
from headstart.errors import MissingTensor, some
from headstart.families.experts import fused_slot, is_fused_experts, split_name

Tensors = Mapping[str, TensorSource]


def has_fused_experts(names: Mapping[str, object]) -> bool:
    return any(is_fused_experts(name) for name in names)


def fuse_experts(tensors: Tensors) -> dict[str, TensorSource]:
    """The fused layout; tensors that are fused already, or not experts, stay as they are."""
    groups: dict[str, dict[tuple[int, str], TensorSource]] = {}
    result: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        slot = fused_slot(name)
        if slot is None:
            result[name] = source
        else:
            groups.setdefault(slot.name, {})[slot.expert, slot.projection] = source
    for name, slots in groups.items():
        kinds = ("down",) if name.endswith(".down_proj") else ("gate", "up")
        count = max(expert for expert, _ in slots) + 1
        wanted = [(expert, kind) for expert in range(count) for kind in kinds]
        lost = [split_name(name, *slot) for slot in wanted if slot not in slots]
        if lost:
            raise MissingTensor(
                f"experts cannot be fused into {name}: {some(lost)} is missing; expected "
                f"experts 0 to {count - 1} with {' and '.join(kinds)}. Restore the head first."
            )
        parts = [slots[slot] for slot in wanted]
        height, width = parts[0].shape
        result[name] = concatenated(parts, (count, height * len(kinds), width))
    return result


def split_experts(tensors: Tensors) -> dict[str, TensorSource]:
    """The per-expert layout; the inverse of `fuse_experts`."""
    result: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        if not is_fused_experts(name):
            result[name] = source
            continue
        kinds = ("down",) if name.endswith(".down_proj") else ("gate", "up")
        count, height, width = source.shape
        each = height // len(kinds)
        flat = reshaped(source, (count * height, width))
        for expert in range(count):
            for place, kind in enumerate(kinds):
                start = expert * height + place * each
                result[split_name(name, expert, kind)] = rows(flat, start, start + each)
    return result
