"""Experts as they are stored, as kernels compute with them.

8-bit floats are read as they are held; integers in groups are packed anew once. An MLP that every
row passes through goes with the routed experts where it has their form, and by itself where not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headstart.backends.cuda.fp8_linear import KernelFp8
from headstart.backends.cuda.group_linear import KernelGroups
from headstart.backends.cuda.kernels.eight_bits import GROUP
from headstart.backends.cuda.kernels.group_experts import GroupExperts
from headstart.backends.cuda.kernels.group_packing import PackedGroups, half_for, planar
from headstart.backends.cuda.kernels.moe import ExpertWeights
from headstart.backends.cuda.kernels.moe_fp8_weights import Fp8Experts, Fp8Matrices
from headstart.backends.cuda.quantized import hold_for_kernels, round_to_fp8
from headstart.checkpoint.quantized.weights import fp8_rows
from headstart.models.feed_forward import MLP, MoE
from headstart.models.linear import Linear, Stack
from headstart.models.quantized import Fp8Stack, GroupStack, QuantizedLinear, QuantizedStack

HeldExperts = ExpertWeights | Fp8Experts | GroupExperts


class KernelGroupStack(Stack):
    """Matrices of one shape in groups of integers, repacked: [E, N, K] as `PackedGroups`."""

    scales: Tensor
    zeros: Tensor | None

    def __init__(self, source: GroupStack, half: int):
        super().__init__(0, 0, 0)
        held = source.quantized
        moved = 1 << (held.bits - 1)
        weight = held.weight  # changed in place: there is no room for two of them
        for expert in range(len(weight)):
            own = weight[expert]
            weight[expert] = planar(own, half) if held.bits == 4 else own ^ moved
        zeros = held.zeros
        if zeros is not None:
            zeros = (zeros.transpose(1, 2).to(torch.int16) - moved).to(torch.int8).contiguous()
        self.weight = nn.Parameter(weight.view(torch.int8), requires_grad=False)
        self.register_buffer("scales", held.scales.transpose(1, 2).contiguous())
        self.register_buffer("zeros", zeros)
        self._sizes = held.bits, held.group_size, half

    @property
    def packed(self) -> PackedGroups:
        return PackedGroups(self.weight.data, self.scales, self.zeros, *self._sizes)


def experts_of(moe: MoE) -> HeldExperts:
    """What the kernels compute a mixture with; shared experts of another form go by themselves."""
    gate_up, down, shared = moe.experts.gate_up, moe.experts.down, moe.shared
    if isinstance(gate_up, Fp8Stack) and isinstance(down, Fp8Stack):
        first, second = _matrices(gate_up), _matrices(down)
        if shared is not None and _is_like_fp8(shared, first, second):
            return Fp8Experts(first, second, _matrices(shared.gate_up), _matrices(shared.down))
        return Fp8Experts(first, second)
    if isinstance(gate_up, KernelGroupStack) and isinstance(down, KernelGroupStack):
        parts = _like_groups(shared, gate_up.packed, down.packed)
        return GroupExperts(gate_up.packed, down.packed, *parts)
    assert type(gate_up) is Stack and type(down) is Stack, "others are dequantised"
    if shared is not None and shared.limit != moe.experts.limit:
        shared = None
    if shared is None or type(shared.gate_up) is not Linear or type(shared.down) is not Linear:
        return ExpertWeights(gate_up.weight, down.weight)
    return ExpertWeights(
        gate_up.weight, down.weight, shared.gate_up.weight, shared.down.weight
    )  # fmt: skip


def _matrices(layer: Linear | Stack) -> Fp8Matrices:
    scales = layer.scales
    assert isinstance(scales, Tensor)
    return Fp8Matrices(layer.weight.data, scales)


def _is_like_fp8(shared: MLP, gate_up: Fp8Matrices, down: Fp8Matrices) -> bool:
    """Whether its parts can be read as further experts: with blocks they begin at one."""
    first, second = shared.gate_up, shared.down
    if not isinstance(first, KernelFp8) or not isinstance(second, KernelFp8):
        return False
    if (bool(first.group), bool(second.group)) != (gate_up.is_blocked, down.is_blocked):
        return False
    width, own = down.weight.shape[2], second.weight.shape[1]
    is_cut = (width < own and width % GROUP) or own % GROUP
    return not (is_cut and (gate_up.is_blocked or down.is_blocked))


def _like_groups(
    shared: MLP | None, gate_up: PackedGroups, down: PackedGroups
) -> tuple[PackedGroups, PackedGroups] | tuple[()]:
    """The shared MLP's matrices where their parts can be read as further experts."""
    if shared is None:
        return ()
    first, second = shared.gate_up, shared.down
    if not isinstance(first, KernelGroups) or not isinstance(second, KernelGroups):
        return ()
    if first.inputs is not None or second.inputs is not None:
        return ()
    pairs = ((first.packed, gate_up), (second.packed, down))
    if any(_kind(one) != _kind(other) for one, other in pairs):
        return ()
    width = down.weight.shape[2] * 8 // down.bits
    tile = max(down.half * 8 // down.bits, down.group)
    if second.packed.shape[1] > width and width % tile:
        return ()
    return first.packed, second.packed


def _kind(packed: PackedGroups) -> tuple[object, ...]:
    has_zeros = packed.zeros is not None
    return packed.bits, packed.group, packed.half, has_zeros, packed.scales.dtype


def hold_all(module: nn.Module, *, to_fp8: bool) -> list[str]:
    """Give every matrix below `module` the form of its kernels; notes about those without one.

    `to_fp8`: plain ones are rounded.
    """
    notes = hold_experts(module) + hold_for_kernels(module)
    if to_fp8:
        round_experts(module)
        round_to_fp8(module)
    return notes


def hold_experts(module: nn.Module) -> list[str]:
    """Give the experts of every mixture below `module` the form of their kernels; notes about
    those that have none."""
    dequantized = 0
    for moe in [part for part in module.modules() if isinstance(part, MoE)]:
        if isinstance(moe.shared_gate, QuantizedLinear):  # one output: read beside the choice
            moe.shared_gate = _plain_linear(moe.shared_gate)
        experts = moe.experts
        if experts.limit is not None or not _fits(experts.gate_up, experts.down):
            for name in ("gate_up", "down"):
                stack = getattr(experts, name)
                if isinstance(stack, QuantizedStack):
                    setattr(experts, name, _plain_stack(stack))
                    dequantized += 1
        for name in ("gate_up", "down"):  # each original is freed before the next is packed
            stack = getattr(experts, name)
            if isinstance(stack, GroupStack):
                setattr(experts, name, KernelGroupStack(stack, _half_of(stack) or 0))
    if not dequantized:
        return []
    return [
        f"{dequantized} stacks of experts are dequantised: kernels want gate, up and down in one "
        "form, groups of a multiple of 32 inputs, and no limits of inner products"
    ]


def round_experts(module: nn.Module) -> None:
    """Round the plain experts of every mixture below `module`, with one scale per output row."""
    for moe in [part for part in module.modules() if isinstance(part, MoE)]:
        for name in ("gate_up", "down") if moe.experts.limit is None else ():
            stack = getattr(moe.experts, name)
            if type(stack) is Stack:
                values = stack.weight.detach()
                setattr(moe.experts, name, Fp8Stack(fp8_rows(values), values.dtype))


def _fits(gate_up: Stack, down: Stack) -> bool:
    """Whether kernels compute with two stacks as they are."""
    if isinstance(gate_up, Fp8Stack) and isinstance(down, Fp8Stack):
        return True
    if not isinstance(gate_up, GroupStack) or not isinstance(down, GroupStack):
        return type(gate_up) is Stack and type(down) is Stack
    return _half_of(gate_up) is not None and _half_of(down) is not None


def _half_of(stack: GroupStack) -> int | None:
    held = stack.quantized
    return half_for(held.shape[-1], held.group_size, held.bits)


def _plain_linear(layer: QuantizedLinear) -> Linear:
    result = Linear(0, 0)
    result.weight, result.bias = nn.Parameter(layer.matrix, requires_grad=False), layer.bias
    return result


def _plain_stack(stack: QuantizedStack) -> Stack:
    """One expert at a time, since all in fp32 would be far more than the model."""
    held, result = stack.quantized, Stack(0, 0, 0)
    values = torch.empty(held.shape, dtype=stack.dtype, device=held.weight.device)
    for expert in range(held.shape[0]):
        values[expert] = held.matrix(expert).dequantized(stack.dtype)
    result.weight = nn.Parameter(values, requires_grad=False)
    return result
