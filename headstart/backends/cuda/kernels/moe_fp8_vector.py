"""Experts in 8-bit floats for a row or a few, without tiles: as `moe_vector.py`, for `moe_fp8.py`.

Rows come rounded in groups of 128 inputs, and the second product rounds what the first gave in the
same groups: so the numbers that are multiplied are those of the tiles, added in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import GROUP, fp8_rows, to_fp8
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe_fp8_weights import Fp8Experts, first_matrix, second_matrix

CUTS = (Shape(outputs=2, inputs=1024, warps=2), Shape(outputs=8, inputs=512, warps=2))
_GROUP = tl.constexpr(GROUP)


def fp8_vector_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Fp8Experts,
    shapes: tuple[Shape, Shape] = CUTS,
) -> Tensor:  # fmt: skip
    """x [M, H], chosen and weights [M, C] -> terms [C, M, H] in fp32, as `fp8_terms`."""
    rows, choices = chosen.shape
    pairs, hidden, width = rows * choices, x.shape[1], experts.width
    assert chosen.is_contiguous() and weights.is_contiguous()
    rounded = fp8_rows(x.contiguous(), GROUP)
    inner = torch.empty(pairs, width, dtype=torch.float32, device=x.device)
    terms = torch.empty(choices, rows, hidden, dtype=torch.float32, device=x.device)
    sizes = (rows, hidden, width, experts.shared_width, experts.count)
    first, second = shapes
    own, other = experts.operands
    is_early = x.is_cuda
    # May be launched before its forerunner has ended.
    beside = {"launch_pdl": True} if is_early else {}
    _first[(triton.cdiv(width, first.outputs), pairs)](
        rounded.values, rounded.scales, *own, chosen, inner, *sizes, CHOICES=choices,
        IS_BLOCKED=experts.gate_up.is_blocked, BLOCK_N=first.outputs,
        GROUPS=_groups(first, hidden), IS_EARLY=is_early, num_warps=first.warps,
    )  # fmt: skip
    _second[(triton.cdiv(hidden, second.outputs), pairs)](
        inner, *other, chosen, weights, terms, *sizes, CHOICES=choices,
        IS_BLOCKED=experts.down.is_blocked, BLOCK_N=second.outputs,
        GROUPS=_groups(second, width), IS_EARLY=is_early, num_warps=second.warps, **beside,
    )  # fmt: skip
    return terms


def _groups(cut: Shape, inputs: int) -> int:
    """Groups of a step."""
    all_groups: int = triton.next_power_of_2(triton.cdiv(inputs, GROUP))
    return min(cut.inputs // GROUP, all_groups)


@jit
def _weights(base, columns, outputs, stride, at, inputs):
    """[BLOCK_N, GROUPS, 128] of a matrix, as they are stored."""
    mask = (columns < outputs)[:, None, None] & (at < inputs)[None, :, :]
    where = columns.to(tl.int64)[:, None, None] * stride + at[None, :, :]
    return tl.load(base + where, mask, 0.0)


@jit
def _total(products):
    """[BLOCK_N] of [BLOCK_N, GROUPS, 128]."""
    return tl.sum(tl.sum(products, 2), 1)


@jit(do_not_specialize=["rows"])
def _first(x, x_scales, weight, scales, shared, shared_scales, chosen, inner, rows, hidden, width,
           shared_width, num_experts, CHOICES: tl.constexpr, IS_BLOCKED: tl.constexpr,
           BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    """silu(x G^T) * (x U^T) of one pair, for BLOCK_N columns of its expert."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK_N
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    if expert >= 0:
        columns = column + tl.arange(0, BLOCK_N)
        row = pair // CHOICES
        base, size, to_up, outputs = first_matrix(
            weight, scales, shared, shared_scales, expert, column, hidden, width, shared_width,
            num_experts, IS_BLOCKED,
        )  # fmt: skip
        up_base = base + to_up.to(tl.int64) * hidden
        up_size = size + to_up
        if IS_BLOCKED:
            up_size = size + to_up // _GROUP * tl.cdiv(hidden, _GROUP)
        gate = tl.zeros((BLOCK_N, GROUPS, _GROUP), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, GROUPS, _GROUP), dtype=tl.float32)
        for start in range(0, hidden, GROUPS * _GROUP):
            group = start // _GROUP + tl.arange(0, GROUPS)
            at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
            is_group = group * _GROUP < hidden
            g = _weights(base, columns, outputs, hidden, at, hidden)
            u = _weights(up_base, columns, outputs, hidden, at, hidden)
            v = tl.load(x + row * hidden + at, at < hidden, 0.0).to(tl.float32)
            grown = tl.load(x_scales + group * rows + row, is_group, 0.0)
            v *= grown[:, None]
            if IS_BLOCKED:
                of_gate = tl.load(size + group, is_group, 0.0)
                of_up = tl.load(up_size + group, is_group, 0.0)
                gate += g.to(tl.float32) * (v * of_gate[:, None])[None, :, :]
                up += u.to(tl.float32) * (v * of_up[:, None])[None, :, :]
            else:
                gate += g.to(tl.float32) * v[None, :, :]
                up += u.to(tl.float32) * v[None, :, :]
        gates, ups = _total(gate), _total(up)
        if not IS_BLOCKED:
            own = tl.arange(0, BLOCK_N)
            gates *= tl.load(size + own, columns < outputs, 0.0)
            ups *= tl.load(up_size + own, columns < outputs, 0.0)
        value = gates * tl.sigmoid(gates) * ups
        tl.store(inner + pair * width + columns, value, columns < width)


@jit
def _rounded(inner, at, width):
    """[GROUPS, 128] of one pair's numbers, each group rounded to e4m3 and back."""
    value = tl.load(inner + at, at < width, 0.0)
    steps, grown = to_fp8(value, tl.max(tl.abs(value), 1)[:, None])
    return steps.to(tl.float32) * grown


@jit(do_not_specialize=["rows"])
def _second(inner, weight, scales, shared, shared_scales, chosen, weights, terms, rows, hidden,
            width, shared_width, num_experts, CHOICES: tl.constexpr, IS_BLOCKED: tl.constexpr,
            BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    """What one pair's expert says, weighed, for BLOCK_N outputs; zero for a row of no request."""
    column = tl.program_id(0) * BLOCK_N
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    is_used = (expert >= 0).to(tl.int32)
    columns = column + tl.arange(0, BLOCK_N)
    base, size, stride, inputs = second_matrix(
        weight, scales, shared, shared_scales, expert * is_used, column, hidden, width,
        shared_width, num_experts, IS_BLOCKED,
    )  # fmt: skip
    inputs = inputs * is_used
    group = tl.arange(0, GROUPS)
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    # The first weights are loaded before the first product is waited for, the others after it.
    w = _weights(base, columns, hidden, stride, at, inputs)
    share = tl.load(weights + pair)
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    v = _rounded(inner + pair * width, at, inputs)
    if IS_BLOCKED:
        v *= tl.load(size + group, group * _GROUP < inputs, 0.0)[:, None]
    sums = w.to(tl.float32) * v[None, :, :]
    for start in range(GROUPS * _GROUP, inputs, GROUPS * _GROUP):
        group = start // _GROUP + tl.arange(0, GROUPS)
        at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        w = _weights(base, columns, hidden, stride, at, inputs)
        v = _rounded(inner + pair * width, at, inputs)
        if IS_BLOCKED:
            v *= tl.load(size + group, group * _GROUP < inputs, 0.0)[:, None]
        sums += w.to(tl.float32) * v[None, :, :]
    value = _total(sums) * share
    if not IS_BLOCKED:
        value *= tl.load(size + tl.arange(0, BLOCK_N), columns < hidden, 0.0)
    place = (pair % CHOICES * rows + pair // CHOICES).to(tl.int64) * hidden
    tl.store(terms + place + columns, value, columns < hidden)
