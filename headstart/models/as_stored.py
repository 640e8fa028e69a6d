"""Matrices that stay quantised in memory: planned before memory is taken, read in their own form.

Parts of a merged matrix (q, k, v; gate, up; experts) go into one quantised matrix where they have
one form. Where they do not, or where the backend does not compute with the form, they are
dequantised while they are read, and a note says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.quantized.weights import (
    FP8_BLOCK,
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
)
from headstart.checkpoint.reader import torch_dtype
from headstart.checkpoint.source import TensorSource
from headstart.models.feed_forward import Mixture
from headstart.models.linear import Linear, Stack
from headstart.models.quantized import quantized_module
from headstart.models.weight_map import Target, Targets

Sources = Mapping[str, TensorSource | StoredWeight]


@dataclass(frozen=True)
class Part:
    """A stored weight, and the place that it fills."""

    weight: StoredWeight
    target: Target


@dataclass
class AsStored:
    """Which matrices of a model stay as they are stored, by the path of their module."""

    parts: dict[str, list[Part]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dequantized: list[tuple[StoredWeight, str]] = field(default_factory=list)  # and why

    @property
    def parameters(self) -> set[str]:
        return {f"{path}.weight" for path in self.parts}

    def load(self, module: nn.Module, path: str, dtype: torch.dtype, device: torch.device) -> None:
        """Read one matrix and put the module that holds it in the place of the plain one."""
        parent, _, name = path.rpartition(".")
        plain = module.get_submodule(path)
        assert isinstance(plain, Linear | Stack)
        parts, shape = self.parts[path], self.shapes[path]
        try:
            weight = _merged(parts, shape, device)
        except _Differ as differ:
            self.dequantized += [(part.weight, str(differ)) for part in self.parts.pop(path)]
            values = torch.empty(shape, dtype=dtype, device=device)
            for part in parts:
                fill_values(part.weight, part.target.of(values), part.target.order)
            plain.weight = nn.Parameter(values, requires_grad=False)
            return
        bias = plain.bias.data if isinstance(plain, Linear) and plain.bias is not None else None
        setattr(module.get_submodule(parent), name, quantized_module(weight, bias, dtype))

    def notes(self, dtype: torch.dtype) -> list[str]:
        """What stays quantised and what does not, and what that costs, for people."""
        own = str(dtype).removeprefix("torch.")
        kept = Counter(part.weight.words for parts in self.parts.values() for part in parts)
        notes = [f"{count} weights stay as stored: {words}" for words, count in kept.items()]
        reasons: dict[tuple[str, str], list[StoredWeight]] = defaultdict(list)
        for weight, why in self.dequantized:
            reasons[weight.words, why].append(weight)
        for (words, why), weights in reasons.items():
            stored = sum(weight.num_bytes for weight in weights)
            taken = sum(prod(weight.shape) for weight in weights) * dtype.itemsize
            notes.append(
                f"{len(weights)} weights are dequantised to {own} at load, {_size(taken)} in place "
                f"of {_size(stored)} ({words}): {why}"
            )
        return notes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def plan_as_stored(
    module: nn.Module, targets: Targets, tensors: Sources, forms: Collection[str], why_not: str,
    experts: Collection[str] | None = None,
) -> AsStored:  # fmt: skip
    """Take matrices that stay quantised out of a module that has no memory yet.

    `forms`: those that the backend computes with, and `experts`: in a mixture of experts, where it
    is not all of them; `why_not`: why not others.
    """
    mixtures = tuple(f"{at}." for at, part in module.named_modules() if isinstance(part, Mixture))
    plan, filled = AsStored(), defaultdict(list)
    for name, target in targets:
        filled[target.parameter].append((tensors.get(name), target))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for parameter, found in filled.items():
        quantized = [Part(w, target) for w, target in found if isinstance(w, StoredWeight)]
        if not quantized:
            continue
        path = parameter.removesuffix(".weight")
        owner = module.get_submodule(path) if path != parameter else module
        taken = forms if experts is None or not path.startswith(mixtures) else experts
        reason = _reason(quantized, len(found), type(owner), taken, why_not)
        if reason is None:
            plan.parts[path] = quantized
            plan.shapes[path] = tuple(parameters[parameter].shape)
            owner.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        else:
            plan.dequantized += [(part.weight, reason) for part in quantized]
    return plan


def _reason(
    parts: list[Part], count: int, owner: type, forms: Collection[str], why_not: str
) -> str | None:
    """Why a matrix of these parts cannot stay quantised, or None."""
    first = parts[0].weight
    if not all(part.weight.form in forms for part in parts):
        return why_not if first.form != "values" else _NO_FORM
    if owner not in (Linear, Stack):
        return "the matrix is used in another way than by a product"
    if len(parts) < count:
        return "the matrix is merged with parts that are not quantised"
    alike = {(part.weight.form, part.weight.num_groups) for part in parts}
    if len(alike) > 1:
        return "the parts of a merged matrix are stored in different ways"
    if first.form == "fp8-block" and not all(_keeps_blocks(part) for part in parts):
        return "the parts of a merged matrix do not end with their blocks of scales"
    return None


_NO_FORM = "no backend computes with this format"


class _Differ(Exception):
    """Parts turn out, when they are read, not to fit into one matrix."""


def _keeps_blocks(part: Part) -> bool:
    if part.target.start % FP8_BLOCK:
        return False
    return not part.target.order or _block_order(part.target.order) is not None


def _block_order(order: tuple[int, ...]) -> torch.Tensor | None:
    """The order of whole blocks that an order of rows is, or None."""
    if len(order) % FP8_BLOCK:
        return None
    rows = torch.tensor(order).view(-1, FP8_BLOCK)
    starts = rows[:, 0]
    is_whole = torch.equal(rows, starts[:, None] + torch.arange(FP8_BLOCK))
    return starts // FP8_BLOCK if is_whole and not (starts % FP8_BLOCK).any() else None


def _merged(parts: list[Part], shape: tuple[int, ...], device: torch.device) -> QuantizedWeight:
    """One quantised matrix, or a stack of them, of parts that have one form."""
    held = _empty(parts, shape, device)
    for number, part in enumerate(parts):
        target = part.target
        for matrix in range(part.weight.stack):
            weight = _in_order(part.weight.quantized(matrix), target.order)
            expert = matrix if part.weight.stack > 1 else target.expert
            if isinstance(weight, GroupWeight):
                assert isinstance(held, GroupWeight)
                held = _with_inputs(held, weight, is_first=number + matrix == 0)
            _place(held, weight, expert if len(shape) == 3 else None, target.start)
    return held


def _empty(parts: list[Part], shape: tuple[int, ...], device: torch.device) -> QuantizedWeight:
    first = parts[0].weight
    *leading, rows, columns = shape
    if first.form.startswith("fp8"):
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        size = (*leading, rows)
        if first.form == "fp8-block":
            size = (*leading, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return Fp8Weight(weight, torch.empty(size, device=device))
    bits = 4 if first.form.startswith("int4") else 8
    dtypes = {part.weight.scale_dtype for part in parts}
    dtype = torch_dtype(dtypes.pop()) if len(dtypes) == 1 else torch.float32
    weight = torch.empty(*leading, rows, columns * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(*leading, rows, first.num_groups, dtype=dtype, device=device)
    return GroupWeight(bits, weight, scales)


def _with_inputs(held: GroupWeight, part: GroupWeight, *, is_first: bool) -> GroupWeight:
    """What a part adds to all: zero points, where any part has some, and its order of columns."""
    zeros, inputs = held.zeros, held.inputs
    if part.zeros is not None and zeros is None:
        zeros = torch.full_like(held.scales, 2 ** (held.bits - 1), dtype=torch.uint8)
    mine = None if part.inputs is None else part.inputs.to(held.weight.device)
    if is_first and held.weight.dim() == 2:
        inputs = mine
    elif (inputs is None) != (mine is None) or (
        inputs is not None and mine is not None and not torch.equal(inputs, mine)
    ):
        raise _Differ("the parts of a merged matrix have their columns sorted in different ways")
    return GroupWeight(held.bits, held.weight, held.scales, zeros, inputs)


def _in_order(weight: QuantizedWeight, order: tuple[int, ...]) -> QuantizedWeight:
    if not order:
        return weight
    rows = torch.tensor(order)
    if isinstance(weight, GroupWeight):
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return GroupWeight(
            weight.bits, weight.weight[rows], weight.scales[rows], zeros, weight.inputs
        )
    codes = weight.weight.view(torch.uint8)[rows].view(weight.weight.dtype)
    if weight.form == "fp8-row":
        return Fp8Weight(codes, weight.scales[rows])
    blocks = _block_order(order)
    assert blocks is not None
    return Fp8Weight(codes, weight.scales[blocks])


def _place(held: QuantizedWeight, part: QuantizedWeight, expert: int | None, start: int) -> None:
    mine, tensors = part.tensors, held.tensors
    for name in ("weight", "scales", "zeros"):
        whole, value = tensors.get(name), mine.get(name)
        if whole is None or value is None:
            continue
        own = whole if expert is None else whole[expert]
        first = start
        if held.form == "fp8-block" and name == "scales":
            first = start // FP8_BLOCK
        own[first : first + len(value)].copy_(value.to(own.dtype))


def fill_values(weight: StoredWeight, part: torch.Tensor, order: tuple[int, ...]) -> None:
    """Dequantise a weight into its place, one matrix of a stack at a time."""
    for number in range(weight.stack):
        values = weight.values(part.dtype, number)
        if order:
            values = values[torch.tensor(order)]
        (part if part.dim() == 2 else part[number]).copy_(values)
