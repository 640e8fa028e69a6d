"""Rows for quantised experts: rounded to 8 bits, and listed by expert, in one launch.

Up to `MOST_LISTED` rows each pair of a row and an expert has a list of its own: the first pair with
an expert lists all pairs that have it, the lists of the others are empty. So the products need no
look at what was chosen, and a launch has the same size whatever that was. Of more rows pairs are
sorted (`sorting.py`).

M rows, C choices of a row, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import (
    Fp8Rows,
    IntegerRows,
    fp8_rows,
    integer_rows,
    store_fp8,
    store_integers,
)
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.moe import scan
from headstart.backends.cuda.kernels.sorting import Lists, empty_lists, sort_pairs, tile_for

MOST_LISTED = 64
_WIDTH = 1024  # inputs that a program rounds
_INTEGER_TILE = 16  # pairs: each is two rows of integers, whose sums take registers


def fp8_and_lists(x: Tensor, chosen: Tensor, num_experts: int, group: int) -> tuple[Fp8Rows, Lists]:
    """x [M, K] in e4m3 with scales of groups, and the lists of chosen [M, C] int32."""
    rows, inputs = x.shape
    if rows > MOST_LISTED:
        return fp8_rows(x, group), sort_pairs(chosen, num_experts)
    values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(triton.cdiv(inputs, group), rows, dtype=torch.float32, device=x.device)
    tile = tile_for(chosen.numel(), num_experts)
    lists = _launch(x, chosen, values, scales, None, group, tile)
    return Fp8Rows(values, scales, group), lists


def integers_and_lists(
    x: Tensor, chosen: Tensor, num_experts: int, group: int
) -> tuple[IntegerRows, Lists]:
    """The same with x as pairs of rows of integers."""
    rows, inputs = x.shape
    if rows > MOST_LISTED:
        return integer_rows(x, group), sort_pairs(chosen, num_experts)
    values = torch.empty(2 * rows, inputs, dtype=torch.int8, device=x.device)
    scales = torch.empty(triton.cdiv(inputs, group), 2 * rows, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales)
    lists = _launch(x, chosen, values, scales, sums, group, _INTEGER_TILE)
    return IntegerRows(values, scales, sums, group), lists


def _launch(
    x: Tensor, chosen: Tensor, values: Tensor, scales: Tensor, sums: Tensor | None, group: int,
    tile: int,
) -> Lists:  # fmt: skip
    rows, inputs = x.shape
    choices = chosen.shape[1]
    assert x.is_contiguous() and chosen.is_contiguous()
    lists = empty_lists(chosen, MOST_LISTED, tile)
    parts = triton.cdiv(inputs, _WIDTH)
    _round_and_list[(max(rows * choices, rows * parts),)](
        x, values, scales, sums, chosen, lists.starts, lists.order, rows, inputs, parts,
        CHOICES=choices, BLOCK_R=16 if rows <= 16 else MOST_LISTED, MOST=MOST_LISTED,
        BLOCK_C=triton.next_power_of_2(choices), GROUP=group, BLOCK=_WIDTH, num_warps=4,
    )  # fmt: skip
    return lists


@jit(do_not_specialize=["rows"])
def _round_and_list(x, values, scales, sums, chosen, starts, order, rows, inputs, parts,
                    CHOICES: tl.constexpr, BLOCK_R: tl.constexpr, MOST: tl.constexpr,
                    BLOCK_C: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program has the list of one pair, and a part of one row."""
    number = tl.program_id(0)
    if number < rows * CHOICES:
        _, own, count = scan(chosen, number, rows, CHOICES, BLOCK_R, BLOCK_C)
        rank = tl.cumsum((own >= 0).to(tl.int32), 0) - 1
        tl.store(order + number * MOST + rank, own, (own >= 0) & (rank < count))
        tl.store(starts + 2 * number, number * MOST)
        tl.store(starts + 2 * number + 1, count)
    if number < rows * parts:
        row = (number // parts).to(tl.int64)
        first = number % parts * BLOCK
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * inputs + at, at < inputs, 0.0).to(tl.float32)
        if sums is None:
            store_fp8(value, values, scales, row, rows, inputs, first, GROUP, BLOCK)
        else:
            store_integers(value, values, scales, sums, row, rows, inputs, first, GROUP, BLOCK)
