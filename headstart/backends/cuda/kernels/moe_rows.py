"""Rows for quantised experts: rounded to 8 bits, and listed by expert, in one launch.

Up to `MOST_LISTED` rows each expert has a list of the pairs of a row and an expert that have it.
Where there are fewer pairs than experts each pair has a list instead: the first pair with an expert
lists all that have it, the lists of the others are empty. So the products need no look at what was
chosen, and a launch has the same size whatever that was. Of more rows pairs are sorted
(`sorting.py`).

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
from headstart.backends.cuda.kernels.sorting import (
    Lists,
    empty_expert_lists,
    empty_lists,
    sort_pairs,
    tile_for,
)

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
    lists = _launch(x, chosen, num_experts, values, scales, None, group, tile)
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
    lists = _launch(x, chosen, num_experts, values, scales, sums, group, _INTEGER_TILE)
    return IntegerRows(values, scales, sums, group), lists


def is_by_expert(pairs: int, num_experts: int) -> bool:
    """Whether lists of experts are fewer than lists of pairs."""
    return num_experts + 1 < pairs


def _launch(
    x: Tensor, chosen: Tensor, num_experts: int, values: Tensor, scales: Tensor,
    sums: Tensor | None, group: int, tile: int,
) -> Lists:  # fmt: skip
    rows, inputs = x.shape
    choices = chosen.shape[1]
    assert x.is_contiguous() and chosen.is_contiguous()
    if is_by_expert(chosen.numel(), num_experts):
        lists = empty_expert_lists(chosen, num_experts, MOST_LISTED, tile)
    else:
        lists = empty_lists(chosen, MOST_LISTED, tile)
    parts = triton.cdiv(inputs, _WIDTH)
    _round_and_list[(max(lists.count, rows * parts),)](
        x, values, scales, sums, chosen, lists.experts, lists.starts, lists.order, lists.count,
        rows, inputs, parts, CHOICES=choices, IS_BY_EXPERT=lists.is_by_expert,
        BLOCK_R=16 if rows <= 16 else MOST_LISTED, MOST=MOST_LISTED,
        BLOCK_C=triton.next_power_of_2(choices), GROUP=group, BLOCK=_WIDTH, num_warps=4,
    )  # fmt: skip
    return lists


@jit
def clear_pairs(result, chosen, list_number, columns, rows, outputs, CHOICES: tl.constexpr,
                IS_BY_EXPERT: tl.constexpr, IS_TERMS: tl.constexpr):  # fmt: skip
    """Make zero what pairs of no expert give: all of them, or the one that `list_number` is.

    result has a line for each pair, or with IS_TERMS terms, which lie by choice, then by row.
    """
    first = 0
    count = rows * CHOICES
    if not IS_BY_EXPERT:
        first = list_number
        count = list_number + 1
    for start in range(first, count, 16):
        pair = start + tl.arange(0, 16)
        expert = tl.load(chosen + pair, pair < count, 0)
        line = pair
        if IS_TERMS:
            line = pair % CHOICES * rows + pair // CHOICES
        where = result + line[None, :].to(tl.int64) * outputs + columns[:, None]
        nothing = tl.zeros((columns.shape[0], 16), dtype=result.dtype.element_ty)
        tl.store(where, nothing, (expert < 0)[None, :] & (columns < outputs)[:, None])


@jit
def _pairs_of(chosen, expert, rows, CHOICES: tl.constexpr, BLOCK_R: tl.constexpr,
              BLOCK_C: tl.constexpr):  # fmt: skip
    """The pairs [BLOCK_R] of the rows that chose `expert`, or -1, and how many there are."""
    row = tl.arange(0, BLOCK_R)
    choice = tl.arange(0, BLOCK_C)
    is_choice = (row[:, None] < rows) & (choice[None, :] < CHOICES)
    ids = tl.load(chosen + row[:, None] * CHOICES + choice[None, :], is_choice, -1)
    pairs = row[:, None] * CHOICES + choice[None, :]
    own = tl.max(tl.where((ids == expert) & (expert >= 0), pairs, -1), 1)
    return own, tl.sum((own >= 0).to(tl.int32), 0)


@jit(do_not_specialize=["rows", "num_lists"])
def _round_and_list(x, values, scales, sums, chosen, experts, starts, order, num_lists, rows,
                    inputs, parts, CHOICES: tl.constexpr, IS_BY_EXPERT: tl.constexpr,
                    BLOCK_R: tl.constexpr, MOST: tl.constexpr, BLOCK_C: tl.constexpr,
                    GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program has one list, and a part of one row."""
    number = tl.program_id(0)
    if number < num_lists:
        if IS_BY_EXPERT:
            expert = number - 1
            own, count = _pairs_of(chosen, expert, rows, CHOICES, BLOCK_R, BLOCK_C)
            tl.store(experts + number, expert)
        else:
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
