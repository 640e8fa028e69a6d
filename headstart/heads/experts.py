"""Moves a head's experts between one tensor each, stacks and fused tensors, value by value.

Fusing is concatenation of stored bytes and splitting is cutting them, because gate rows precede
up rows and experts follow one another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice

from headstart.checkpoint.source import TensorSource, concatenated, reshaped, rows
from headstart.errors import MissingTensor, ShapeMismatch, some
from headstart.families.experts import fused_slot, is_fused_experts, split_name

Tensors = Mapping[str, TensorSource]
_STACK = re.compile(r"(?P<stem>.*\bexperts)\.(?P<rest>(?:gate|up|down)_proj\.weight)")


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
        kinds = _kinds(name)
        count = max(expert for expert, _ in slots) + 1
        wanted = ((expert, kind) for expert in range(count) for kind in kinds)
        # A few are enough: a damaged number may stand for billions of missing experts.
        lost = list(islice((split_name(name, *slot) for slot in wanted if slot not in slots), 3))
        if lost:
            raise MissingTensor(
                f"experts cannot be fused into {name}: {some(lost)} is missing; expected "
                f"experts 0 to {count - 1} with {' and '.join(kinds)}. Restore the head first."
            )
        parts = [slots[expert, kind] for expert in range(count) for kind in kinds]
        height, width = _common_shape(name, parts)
        result[name] = concatenated(parts, (count, height * len(kinds), width))
    return result


def split_experts(tensors: Tensors) -> dict[str, TensorSource]:
    """The per-expert layout; the inverse of `fuse_experts`."""
    result: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        if not is_fused_experts(name):
            result[name] = source
            continue
        kinds = _kinds(name)
        if len(source.shape) != 3 or 0 in source.shape or source.shape[1] % len(kinds):
            raise ShapeMismatch(
                f"{name} has shape {list(source.shape)}; expected [experts, rows of "
                f"{' and '.join(kinds)}, columns]. The file is damaged: export the head again."
            )
        count, height, width = source.shape
        each = height // len(kinds)
        flat = reshaped(source, (count * height, width))
        for expert in range(count):
            for place, kind in enumerate(kinds):
                start = expert * height + place * each
                result[split_name(name, expert, kind)] = rows(flat, start, start + each)
    return result


def stack_experts(tensors: Tensors) -> dict[str, TensorSource]:
    """One stack for each projection, `...experts.gate_proj.weight`; the rest stays as it is."""
    result: dict[str, TensorSource] = {}
    stacks: dict[str, dict[int, TensorSource]] = {}
    for name, source in split_experts(tensors).items():
        slot = fused_slot(name)
        if slot is None:
            result[name] = source
        else:
            stem = slot.name.rpartition(".")[0]
            stacks.setdefault(f"{stem}.{slot.projection}_proj.weight", {})[slot.expert] = source
    for name, parts in stacks.items():
        lost = next((expert for expert in range(len(parts)) if expert not in parts), None)
        if lost is not None:
            raise MissingTensor(
                f"experts cannot be stacked into {name}: expert {lost} is missing; expected 0 to "
                f"{max(parts)}. Restore the head first."
            )
        ordered = [parts[expert] for expert in range(len(parts))]
        height, width = _common_shape(name, ordered)
        result[name] = concatenated(ordered, (len(ordered), height, width))
    return result


def unstack_experts(tensors: Tensors) -> dict[str, TensorSource]:
    """The inverse of `stack_experts`, with experts one by one."""
    result: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        found = _STACK.fullmatch(name)
        if found is None:
            result[name] = source
            continue
        if len(source.shape) != 3 or 0 in source.shape:
            raise ShapeMismatch(
                f"{name} has shape {list(source.shape)}; expected a stack of matrices, none of "
                "them empty. The file is damaged: download or export it again."
            )
        count, height, width = source.shape
        flat = reshaped(source, (count * height, width))
        for expert in range(count):
            one = f"{found['stem']}.{expert}.{found['rest']}"
            result[one] = rows(flat, expert * height, (expert + 1) * height)
    return result


def _kinds(fused: str) -> tuple[str, ...]:
    return ("down",) if fused.endswith(".down_proj") else ("gate", "up")


def _common_shape(fused: str, parts: list[TensorSource]) -> tuple[int, int]:
    """Height and width of every part; bytes of unequal parts would run into each other."""
    first = parts[0]
    odd = next((p for p in parts if (p.dtype, p.shape) != (first.dtype, first.shape)), None)
    if odd is not None or len(first.shape) != 2:
        other = odd or first
        raise ShapeMismatch(
            f"experts cannot be fused into {fused}: one has {other.dtype} {list(other.shape)}, the "
            f"first {first.dtype} {list(first.shape)}; expected matrices of one shape and dtype. "
            "The file is damaged: download or export it again."
        )
    return first.shape[0], first.shape[1]
