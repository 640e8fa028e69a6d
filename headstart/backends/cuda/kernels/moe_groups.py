"""Experts in groups of 4- or 8-bit integers: rows through the matrices that they chose.

Products are those of `groups.py`: weights become bytes in registers, a row is a pair of integer
rows, both rows of one product, and sums of a group get the scales of both sides. Lists of pairs are
those of `moe_rows.py`, terms and shared experts those of `moe.py`. What gate and up give is joined
and rounded to pairs of integers by a launch between the two products.

M rows, C choices of a row, E routed experts, H model width, W width of an expert, G inputs of a
group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import silu_integers
from headstart.backends.cuda.kernels.group_experts import GroupExperts, operands
from headstart.backends.cuda.kernels.group_packing import PackedGroups, halves
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe_rows import MOST_LISTED, clear_pairs, integers_and_lists

_FEW_PAIRS = 8  # of a tile, for as many rows: two lines each, of the 16 that a product has


def group_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: GroupExperts,
    shapes: tuple[Shape, Shape] | None = None,
) -> Tensor:  # fmt: skip
    """x [M, H], chosen and weights [M, C] -> terms [C, M, H], as `moe.expert_terms`."""
    rows, choices = chosen.shape
    hidden, width, pairs = x.shape[1], experts.width, rows * choices
    assert weights.is_contiguous()
    gate_up, down = experts.gate_up, experts.down
    rounded, lists = integers_and_lists(x, chosen, experts.count + experts.num_shared, gate_up.half)
    is_sorted = rows > MOST_LISTED
    kind = x.dtype if is_sorted else torch.float32
    # Sorted pairs of no expert are in no list: what they give is made zero here.
    empty = torch.zeros if is_sorted else torch.empty
    inner = empty(pairs, 2 * width, dtype=kind, device=x.device)
    terms = empty(choices, rows, hidden, dtype=kind, device=x.device)
    tile = _FEW_PAIRS if rows <= _FEW_PAIRS else lists.tile
    first, second = shapes or cuts_for(tile)
    listed = (lists.experts, lists.starts, lists.order)
    sizes = (rows, hidden, width, experts.shared_width, experts.count)
    _product[(triton.cdiv(2 * width, first.outputs), lists.count)](
        rounded.values, rounded.scales, rounded.sums, *operands(gate_up, experts.shared_gate_up),
        *listed, chosen, None, inner, *sizes, CHOICES=choices, IS_BY_EXPERT=lists.is_by_expert,
        BLOCK_M=tile, **_sizes(first, gate_up, hidden),
    )  # fmt: skip
    between = silu_integers(inner.unsqueeze(0), down.half)
    is_even = experts.shared_width % width == 0
    _product[(triton.cdiv(hidden, second.outputs), lists.count)](
        between.values, between.scales, between.sums, *operands(down, experts.shared_down),
        *listed, chosen, weights, terms, *sizes, CHOICES=choices, IS_BY_EXPERT=lists.is_by_expert,
        BLOCK_M=tile, **_sizes(second, down, width if is_even else 0),
    )  # fmt: skip
    return terms


def cuts_for(tile: int) -> tuple[Shape, Shape]:
    """Of the two products, for tiles of so many pairs (`benchmarks/gpu_moe.py --cuts`)."""
    # Two lines for each pair: of more than 16 pairs the sums fill the registers of four warps.
    cut = Shape(64, 256, warps=8 if tile > 16 else 4, stages=3 if tile > 16 else 4)
    return cut, cut


def _sizes(cut: Shape, packed: PackedGroups, inputs: int) -> dict[str, int]:
    """Constants of a product; inputs: of every matrix, or 0 where they differ."""
    deep = max(cut.inputs, packed.half * 8 // packed.bits)  # whole tiles of what is packed
    return {
        "GROUP": packed.group, "HALF": packed.half, "IS_PACKED": packed.bits == 4,
        "BLOCK_N": cut.outputs, "BLOCK_K": deep, "IS_EVEN": inputs > 0 and inputs % deep == 0,
        "num_warps": cut.warps, "num_stages": cut.stages,
    }  # fmt: skip


@jit
def _codes(base, source, is_output, stride, first, inputs, HALF: tl.constexpr,
           IS_EVEN: tl.constexpr):  # fmt: skip
    """[BLOCK_N, HALF] bytes of the rows `source`, which have `stride` bytes."""
    at = first + tl.arange(0, HALF)
    mask = is_output[:, None]
    if not IS_EVEN:
        mask = mask & (at[None, :] < inputs)
    return tl.load(base + source[:, None].to(tl.int64) * stride + at[None, :], mask, 0)


@jit
def _add_group(sums, w, x, x_scales, x_sums, scales, zeros, first, line, is_line, lines, source,
               is_output, scale_stride, width, inputs, GROUP: tl.constexpr, HALF: tl.constexpr,
               IS_PACKED: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """sums and what weights w [BLOCK_N, HALF] of the inputs from number `first` on add to them.

    `line`: of x [lines, width], two for each pair.
    """
    mask = is_line
    if not IS_EVEN:
        is_output = is_output & (source * 0 + first < inputs)
        mask = mask & (line * 0 + first < inputs)
    at = first // GROUP * scale_stride + source
    x_at = first // HALF * lines + line
    gain = tl.load(scales + at, is_output, 0.0).to(tl.float32)
    size = tl.load(x_scales + x_at, mask, 0.0)
    where = line[:, None].to(tl.int64) * width + first + tl.arange(0, HALF)[None, :]
    v = tl.load(x + where, mask[:, None], 0)
    part = tl.dot(w, v.T, out_dtype=tl.int32).to(tl.float32)
    if IS_PACKED:
        size *= 1.0 / 16
    if zeros is not None:
        zero = tl.load(zeros + at, is_output, 0).to(tl.float32)
        if IS_PACKED:
            zero *= 16.0
        part -= zero[:, None] * tl.load(x_sums + x_at, mask, 0.0)[None, :]
    return sums + part * (gain[:, None] * size[None, :])


@jit
def _add_step(sums, x, x_scales, x_sums, base, scales, zeros, begin, line, is_line, lines, source,
              is_output, stride, scale_stride, width, inputs, GROUP: tl.constexpr,
              HALF: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK_K: tl.constexpr,
              IS_EVEN: tl.constexpr):  # fmt: skip
    """sums [BLOCK_N, lines of a tile] and what BLOCK_K inputs from number `begin` on add."""
    if IS_PACKED:
        for part in tl.static_range(BLOCK_K // (2 * HALF)):
            first = begin + part * 2 * HALF
            packed = _codes(base, source, is_output, stride, first // 2, inputs // 2, HALF, IS_EVEN)
            low, high = halves(packed)
            sums = _add_group(sums, low, x, x_scales, x_sums, scales, zeros, first, line, is_line,
                              lines, source, is_output, scale_stride, width, inputs, GROUP, HALF,
                              True, IS_EVEN)  # fmt: skip
            sums = _add_group(sums, high, x, x_scales, x_sums, scales, zeros, first + HALF, line,
                              is_line, lines, source, is_output, scale_stride, width, inputs,
                              GROUP, HALF, True, IS_EVEN)  # fmt: skip
    else:
        for part in tl.static_range(BLOCK_K // HALF):
            first = begin + part * HALF
            w = _codes(base, source, is_output, stride, first, inputs, HALF, IS_EVEN)
            sums = _add_group(sums, w, x, x_scales, x_sums, scales, zeros, first, line, is_line,
                              lines, source, is_output, scale_stride, width, inputs, GROUP, HALF,
                              False, IS_EVEN)  # fmt: skip
    return sums


@jit
def matrix_of(expert, columns, weight, scales, zeros, shared, shared_scales, shared_zeros, hidden,
              width, shared_width, num_experts, IS_FIRST: tl.constexpr, GROUP: tl.constexpr,
              PER_WORD: tl.constexpr):  # fmt: skip
    """Where an expert's matrix lies; PER_WORD: weights in what `weight` points to.

    Gives pointers to weights, scales and zeros, which rows of the matrix the outputs `columns` are,
    whether they are there, weights of a row, width of the scales, and inputs of the expert.
    """
    outputs = 2 * width if IS_FIRST else hidden
    inputs = hidden if IS_FIRST else width
    is_output = columns < outputs
    source = columns
    stride = inputs
    scale_stride = outputs
    own = expert.to(tl.int64) * outputs
    base = weight + own * (inputs // PER_WORD)
    size = scales + own * (inputs // GROUP)
    zero = scales  # without zero points this is not read: Triton 3.6 cannot return None
    if zeros is not None:
        zero = zeros + own * (inputs // GROUP)
    if shared is not None:
        part = (expert - num_experts) * width  # columns of the shared MLP before this one's
        if part >= 0:
            base = shared
            size = shared_scales
            if zeros is not None:
                zero = shared_zeros
            if IS_FIRST:
                is_up = (columns >= width).to(tl.int32)
                inner = columns - is_up * width
                source = part + inner + is_up * shared_width
                is_output = is_output & (part + inner < shared_width)
                scale_stride = 2 * shared_width
            else:
                base = shared + part // PER_WORD
                size = shared_scales + part // GROUP * hidden
                if zeros is not None:
                    zero = shared_zeros + part // GROUP * hidden
                stride = shared_width
                inputs = tl.minimum(width, shared_width - part)
    return base, size, zero, source, is_output, stride, scale_stride, inputs


@jit(do_not_specialize=["rows"])
def _product(x, x_scales, x_sums, weight, scales, zeros, shared, shared_scales, shared_zeros,
             experts, starts, order, chosen, weights, result, rows, hidden, width, shared_width,
             num_experts, CHOICES: tl.constexpr, IS_BY_EXPERT: tl.constexpr, GROUP: tl.constexpr,
             HALF: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """Without `weights` gate and up of x's rows, result [pairs, 2 W]; else down of x's pairs, as
    weighed terms."""
    IS_FIRST: tl.constexpr = weights is None
    PER_BYTE: tl.constexpr = 2 if IS_PACKED else 1
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    begin = tl.load(starts + 2 * tile)
    count = tl.load(starts + 2 * tile + 1)
    if IS_FIRST:
        outputs = 2 * width
        inputs = hidden
        lines = 2 * rows
    else:
        outputs = hidden
        inputs = width
        lines = 2 * rows * CHOICES
    if expert < 0:  # of rows of no request, whose pairs are in no list
        clear_pairs(result, chosen, tile, columns, rows, outputs, CHOICES, IS_BY_EXPERT,
                    not IS_FIRST)  # fmt: skip
    width_x = inputs
    base, size, zero, source, is_output, stride, scale_stride, inputs = matrix_of(
        expert, columns, weight, scales, zeros, shared, shared_scales, shared_zeros, hidden, width,
        shared_width, num_experts, IS_FIRST, GROUP, PER_BYTE,
    )  # fmt: skip
    if zeros is None:
        zero = None
    lane = tl.arange(0, 2 * BLOCK_M)
    for start in range(0, count, BLOCK_M):
        is_line = start + lane // 2 < count
        pair = tl.load(order + begin + start + lane // 2, is_line, 0)
        line = 2 * pair + lane % 2
        if IS_FIRST:
            line = 2 * (pair // CHOICES) + lane % 2
        sums = tl.zeros((BLOCK_N, 2 * BLOCK_M), dtype=tl.float32)
        for first in range(0, width_x, BLOCK_K):
            sums = _add_step(sums, x, x_scales, x_sums, base, size, zero, first, line, is_line,
                             lines, source, is_output, stride // PER_BYTE, scale_stride, width_x,
                             inputs, GROUP, HALF, IS_PACKED, BLOCK_K, IS_EVEN)  # fmt: skip
        value = tl.sum(tl.reshape(sums, (BLOCK_N, BLOCK_M, 2)), 2)  # both lines of a pair
        at = start + tl.arange(0, BLOCK_M)
        pairs = tl.load(order + begin + at, at < count, 0)
        place = pairs.to(tl.int64) * outputs
        if not IS_FIRST:
            value *= tl.load(weights + pairs, at < count, 0.0)[None, :]
            # Terms lie by choice, then by row.
            place = (pairs % CHOICES * rows + pairs // CHOICES).to(tl.int64) * outputs
        mask = (at < count)[None, :] & (columns < outputs)[:, None]
        where = place[None, :] + columns[:, None]
        tl.store(result + where, value.to(result.dtype.element_ty), mask)
