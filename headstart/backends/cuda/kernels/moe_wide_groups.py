"""Experts in groups of 4-bit integers for more than a few rows: products of bf16.

Codes become floats as in `wide_groups.py`, whose rows, sums and excess these are; pairs are sorted
by expert (`sorting.py`), and terms and shared experts are those of `moe_groups.py`.

M rows, C choices of a row, H model width, W width of an expert, G inputs of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.group_experts import GroupExperts, operands
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.moe_groups import matrix_of
from headstart.backends.cuda.kernels.moe_rows import MOST_LISTED
from headstart.backends.cuda.kernels.sorting import sort_pairs
from headstart.backends.cuda.kernels.wide_groups import (
    WideCut,
    parted_rows,
    parted_silu,
    wide_sums,
)

# It ran interpreted and was compiled for Hopper; `moe_groups.py` multiplies all rows on GPUs until
# this was timed there (`benchmarks/gpu_moe.py --formats --wide`).
IS_SHOWN_ON_GPUS = False
MOST_FEW = 8  # rows whose pairs of integers are the less work


def takes_wide_experts(rows: int, experts: GroupExperts, dtype: torch.dtype) -> bool:
    """Whether so many rows in `dtype` go through here."""
    is_own = IS_SHOWN_ON_GPUS and (triton.knobs.runtime.interpret or dtype == torch.bfloat16)
    return experts.gate_up.bits == 4 and is_own and rows > MOST_FEW


def wide_group_terms(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: GroupExperts,
    cuts: tuple[WideCut, WideCut] | None = None,
) -> Tensor:  # fmt: skip
    """x [M, H], chosen and weights [M, C] -> terms [C, M, H], as `moe.expert_terms`."""
    rows, choices = chosen.shape
    hidden, width = x.shape[1], experts.width
    gate_up, down = experts.gate_up, experts.down
    lists = sort_pairs(chosen, experts.count + experts.num_shared)
    listed = (lists.experts, lists.starts, lists.order)
    first, second = cuts or cuts_for(lists.tile)
    sizes = (rows, hidden, width, experts.shared_width, experts.count)
    kind = x.dtype if rows > MOST_LISTED else torch.float32
    # Pairs of no expert are in no list: what they give is made zero here.
    inner = torch.zeros(rows * choices, 2 * width, dtype=kind, device=x.device)
    terms = torch.zeros(choices, rows, hidden, dtype=kind, device=x.device)
    parted = parted_rows(x.contiguous(), gate_up.half)
    _product[(triton.cdiv(2 * width, first.outputs), lists.count)](
        parted.values, parted.sums, *operands(gate_up, experts.shared_gate_up, torch.int16),
        *listed, None, inner, *sizes, CHOICES=choices, GROUP=gate_up.group, HALF=gate_up.half,
        BLOCK_M=lists.tile, BLOCK_N=first.outputs, num_warps=first.warps,
        num_stages=first.stages,
    )  # fmt: skip
    between = parted_silu(inner.unsqueeze(0), down.half, x.dtype)
    _product[(triton.cdiv(hidden, second.outputs), lists.count)](
        between.values, between.sums, *operands(down, experts.shared_down, torch.int16), *listed,
        weights, terms, *sizes, CHOICES=choices, GROUP=down.group, HALF=down.half,
        BLOCK_M=lists.tile, BLOCK_N=second.outputs, num_warps=second.warps,
        num_stages=second.stages,
    )  # fmt: skip
    return terms


def cuts_for(tile: int) -> tuple[WideCut, WideCut]:
    """Of the two products, for tiles of so many pairs; by counting."""
    cut = WideCut(64, warps=4, stages=4) if tile <= 16 else WideCut(128, warps=8, stages=3)
    return cut, cut


@jit(do_not_specialize=["rows"])
def _product(x, x_sums, weight, scales, zeros, shared, shared_scales, shared_zeros, experts, starts,
             order, weights, result, rows, hidden, width, shared_width, num_experts,
             CHOICES: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr):  # fmt: skip
    """Without `weights` gate and up of x's rows, result [pairs, 2 W]; else down of x's pairs, as
    weighed terms."""
    IS_FIRST: tl.constexpr = weights is None
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    begin = tl.load(starts + 2 * tile)
    count = tl.load(starts + 2 * tile + 1)
    outputs = 2 * width if IS_FIRST else hidden
    inputs = hidden if IS_FIRST else width
    x_width = inputs
    base, size, zero, source, is_output, stride, scale_stride, inputs = matrix_of(
        expert, columns, weight, scales, zeros, shared, shared_scales, shared_zeros, hidden, width,
        shared_width, num_experts, IS_FIRST, GROUP, PER_WORD=4,
    )  # fmt: skip
    if zeros is None:
        zero = None
    lane = tl.arange(0, BLOCK_M)
    is_line = lane < count
    pair = tl.load(order + begin + lane, is_line, 0)
    line = pair
    if IS_FIRST:
        line = pair // CHOICES
    lines = base + source[:, None].to(tl.int64) * (stride // 4)
    stop = tl.where(count > 0, inputs, 0)
    sums = wide_sums(x, x_sums, lines, size, zero, 0, stop, line, is_line, x_width, source,
                     is_output, scale_stride, GROUP, HALF, BLOCK_M, BLOCK_N)  # fmt: skip
    place = pair.to(tl.int64) * outputs
    if not IS_FIRST:
        sums *= tl.load(weights + pair, is_line, 0.0)[None, :]
        # Terms lie by choice, then by row.
        place = (pair % CHOICES * rows + pair // CHOICES).to(tl.int64) * outputs
    mask = is_line[None, :] & (columns < outputs)[:, None]
    where = place[None, :] + columns[:, None]
    tl.store(result + where, sums.to(result.dtype.element_ty), mask)
