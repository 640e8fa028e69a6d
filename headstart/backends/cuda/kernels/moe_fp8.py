"""Experts in 8-bit floats: rows in e4m3 through the matrices that they chose, on the matrix units.

Weights are e4m3 with one scale per output, or per block of 128 x 128. Rows are rounded in groups of
128 inputs for either, and what gate and up give is rounded where it is made, a group of 128 columns
to a program. Sums of a group are made by the matrix units and get the scales of both sides.

Lists of pairs are those of `moe_rows.py`, terms and shared experts those of `moe.py`. Few rows may
go without tiles (`moe_fp8_vector.py`), with the same numbers rounded in the same way.

M rows, C choices of a row, E routed experts, H model width, W width of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import GROUP, to_fp8
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe import PROGRAMS
from headstart.backends.cuda.kernels.moe_fp8_weights import (
    Fp8Experts,
    first_matrix,
    second_matrix,
)
from headstart.backends.cuda.kernels.moe_rows import MOST_LISTED, clear_pairs, fp8_and_lists

_GROUP = tl.constexpr(GROUP)


def fp8_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Fp8Experts,
    shapes: tuple[Shape, Shape] | None = None,
) -> Tensor:  # fmt: skip
    """x [M, H], chosen and weights [M, C] -> terms [C, M, H], as `moe.expert_terms`."""
    rows, choices = chosen.shape
    hidden, width, pairs = x.shape[1], experts.width, rows * choices
    assert weights.is_contiguous()
    rounded, lists = fp8_and_lists(x, chosen, experts.count + experts.num_shared, GROUP)
    inner = torch.empty(pairs, width, dtype=torch.float8_e4m3fn, device=x.device)
    inner_scales = torch.empty(
        triton.cdiv(width, GROUP), pairs, dtype=torch.float32, device=x.device
    )
    if rows > MOST_LISTED:
        terms = torch.zeros(choices, rows, hidden, dtype=x.dtype, device=x.device)
    else:
        terms = torch.empty(choices, rows, hidden, dtype=torch.float32, device=x.device)
    first, second = shapes or cuts_for(lists.tile, hidden, pairs)
    assert first.outputs == GROUP and GROUP % second.outputs == 0
    assert all(cut.inputs % GROUP == 0 for cut in (first, second))
    listed = (lists.experts, lists.starts, lists.order)
    sizes = (rows, hidden, width, experts.shared_width, experts.count)
    own, other = experts.operands
    _gate_up[(triton.cdiv(width, GROUP), lists.count)](
        rounded.values, rounded.scales, *own, *listed, inner, inner_scales, *sizes,
        CHOICES=choices, IS_BLOCKED=experts.gate_up.is_blocked, BLOCK_M=lists.tile,
        BLOCK_N=first.outputs, BLOCK_K=first.inputs, IS_EVEN=hidden % first.inputs == 0,
        num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    is_even = experts.shared_width % width == 0 and width % second.inputs == 0
    _down[(triton.cdiv(hidden, second.outputs), lists.count)](
        inner, inner_scales, *other, *listed, chosen, weights, terms, *sizes, CHOICES=choices,
        IS_BY_EXPERT=lists.is_by_expert, IS_BLOCKED=experts.down.is_blocked, BLOCK_M=lists.tile,
        BLOCK_N=second.outputs, BLOCK_K=second.inputs, IS_EVEN=is_even, num_warps=second.warps,
        num_stages=second.stages,
    )  # fmt: skip
    return terms


def cuts_for(tile: int, hidden: int, pairs: int) -> tuple[Shape, Shape]:
    """Of the two products, for tiles of so many pairs; benchmarks/gpu_moe.py --cuts tries others.

    The first has as many outputs as share a scale afterwards.
    """
    if tile > 32:  # sums of so many pairs fill the registers of four warps
        return Shape(GROUP, GROUP, warps=8, stages=3), Shape(GROUP, GROUP, warps=8, stages=4)
    wide = GROUP if pairs * (hidden // GROUP) >= PROGRAMS else 64
    return Shape(GROUP, GROUP, warps=4, stages=3), Shape(wide, GROUP, warps=4, stages=4)


@jit
def _rows(x, line, is_line, first, width, inputs, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of the lines `line` of x [..., width], up to number `inputs`."""
    at = first + tl.arange(0, BLOCK_K)
    mask = is_line[:, None]
    if not IS_EVEN:
        mask = mask & (at[None, :] < inputs)
    return tl.load(x + line[:, None].to(tl.int64) * width + at[None, :], mask, 0.0)


@jit
def _matrix(base, columns, outputs, stride, first, inputs, BLOCK_K: tl.constexpr,
            IS_EVEN: tl.constexpr):  # fmt: skip
    at = first + tl.arange(0, BLOCK_K)
    mask = columns[:, None] < outputs
    if not IS_EVEN:
        mask = mask & (at[None, :] < inputs)
    return tl.load(base + columns[:, None].to(tl.int64) * stride + at[None, :], mask, 0.0)


@jit
def _size(scales, first, line, is_line, lines, inputs, IS_EVEN: tl.constexpr):
    """Scales of the rows `line` for the group of inputs that begins at `first`."""
    mask = is_line
    if not IS_EVEN:
        mask = mask & (line * 0 + first < inputs)
    return tl.load(scales + first // _GROUP * lines + line, mask, 0.0)


@jit(do_not_specialize=["rows"])
def _gate_up(x, x_scales, weight, scales, shared, shared_scales, experts, starts, order, inner,
             inner_scales, rows, hidden, width, shared_width, num_experts, CHOICES: tl.constexpr,
             IS_BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    begin = tl.load(starts + 2 * tile)
    count = tl.load(starts + 2 * tile + 1)
    columns = column + tl.arange(0, BLOCK_N)
    base, size, to_up, outputs = first_matrix(
        weight, scales, shared, shared_scales, expert, column, hidden, width, shared_width,
        num_experts, IS_BLOCKED,
    )  # fmt: skip
    up_base = base + to_up.to(tl.int64) * hidden
    up_size = size + to_up
    if IS_BLOCKED:
        up_size = size + to_up // _GROUP * tl.cdiv(hidden, _GROUP)
    for start in range(0, count, BLOCK_M):
        line = start + tl.arange(0, BLOCK_M)
        is_pair = line < count
        pairs = tl.load(order + begin + line, is_pair, 0)
        row = pairs // CHOICES
        gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for before in range(0, hidden, BLOCK_K):
            for part in tl.static_range(BLOCK_K // _GROUP):
                first = before + part * _GROUP
                v = _rows(x, row, is_pair, first, hidden, hidden, _GROUP, IS_EVEN)
                g = _matrix(base, columns, outputs, hidden, first, hidden, _GROUP, IS_EVEN)
                u = _matrix(up_base, columns, outputs, hidden, first, hidden, _GROUP, IS_EVEN)
                grown = _size(x_scales, first, row, is_pair, rows, hidden, IS_EVEN)
                both = grown
                if IS_BLOCKED:
                    # Of a step beyond the matrix the last block's is loaded: it adds zeros.
                    block = tl.minimum(first, hidden - 1) // _GROUP
                    grown = both * tl.load(size + block)
                gate += tl.dot(g, v.T, max_num_imprecise_acc=_GROUP) * grown[None, :]
                if IS_BLOCKED:
                    grown = both * tl.load(up_size + block)
                up += tl.dot(u, v.T, max_num_imprecise_acc=_GROUP) * grown[None, :]
        if not IS_BLOCKED:
            is_output = columns < outputs
            at = tl.arange(0, BLOCK_N)
            gate *= tl.load(size + at, is_output, 0.0)[:, None]
            up *= tl.load(up_size + at, is_output, 0.0)[:, None]
        value = gate * tl.sigmoid(gate) * up
        steps, grown = to_fp8(value, tl.max(tl.abs(value), 0)[None, :])
        mask = is_pair[None, :] & (columns[:, None] < width)
        tl.store(inner + pairs[None, :].to(tl.int64) * width + columns[:, None], steps, mask)
        target = inner_scales + tl.program_id(0) * rows * CHOICES + pairs[None, :]
        tl.store(target, grown, is_pair[None, :])


@jit(do_not_specialize=["rows"])
def _down(inner, inner_scales, weight, scales, shared, shared_scales, experts, starts, order,
          chosen, weights, terms, rows, hidden, width, shared_width, num_experts,
          CHOICES: tl.constexpr, IS_BY_EXPERT: tl.constexpr, IS_BLOCKED: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
          IS_EVEN: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    begin = tl.load(starts + 2 * tile)
    count = tl.load(starts + 2 * tile + 1)
    columns = column + tl.arange(0, BLOCK_N)
    is_output = columns < hidden
    if expert < 0:  # of rows of no request, whose pairs are in no list
        clear_pairs(terms, chosen, tile, columns, rows, hidden, CHOICES, IS_BY_EXPERT, True)
    base, size, stride, inputs = second_matrix(
        weight, scales, shared, shared_scales, expert, column, hidden, width, shared_width,
        num_experts, IS_BLOCKED,
    )  # fmt: skip
    for start in range(0, count, BLOCK_M):
        line = start + tl.arange(0, BLOCK_M)
        is_pair = line < count
        pairs = tl.load(order + begin + line, is_pair, 0)
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for before in range(0, width, BLOCK_K):
            for part in tl.static_range(BLOCK_K // _GROUP):
                first = before + part * _GROUP
                v = _rows(inner, pairs, is_pair, first, width, inputs, _GROUP, IS_EVEN)
                w = _matrix(base, columns, hidden, stride, first, inputs, _GROUP, IS_EVEN)
                grown = _size(inner_scales, first, pairs, is_pair, rows * CHOICES, width, IS_EVEN)
                if IS_BLOCKED:
                    grown *= tl.load(size + tl.minimum(first, inputs - 1) // _GROUP)
                sums += tl.dot(w, v.T, max_num_imprecise_acc=_GROUP) * grown[None, :]
        share = tl.load(weights + pairs, is_pair, 0.0)
        value = sums * share[None, :]
        if not IS_BLOCKED:
            value *= tl.load(size + tl.arange(0, BLOCK_N), is_output, 0.0)[:, None]
        # Terms lie by choice, then by row.
        place = (pairs % CHOICES * rows + pairs // CHOICES).to(tl.int64) * hidden
        mask = is_pair[None, :] & is_output[:, None]
        tl.store(terms + place[None, :] + columns[:, None], value.to(terms.dtype.element_ty), mask)
