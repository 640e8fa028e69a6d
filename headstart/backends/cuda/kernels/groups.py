"""x W^T with weights of 4 or 8 bits in groups of inputs, on the integer matrix units.

Weights of 4 bits become bytes in registers (`group_packing.py`); floats would take several times as
many instructions. Rows are pairs of integer rows (`eight_bits.py`). The sums of a group are exact
and get the scales of both sides; a zero point takes itself times the sum of the row's integers from
them.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.choice import best_of_rows, best_of_values
from headstart.backends.cuda.kernels.eight_bits import FINE, IntegerRows
from headstart.backends.cuda.kernels.group_packing import PackedGroups, codes_of, halves
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, splits_for, tile_rows

TILE_ROWS = (16, 32, 64)
# Up to so many rows both integers of a row are rows of a product, which takes fewer instructions;
# with more there would be too many sums.
_MOST_STACKED = 16
# On an H200 matrices of 7B models were faster so up to 128 rows, and as copies in bf16 at 320.
MAX_ROWS = 192


def partial_groups(x: IntegerRows, packed: PackedGroups, shape: Shape | None = None) -> Tensor:
    """x [M, K] -> [S, M, N] fp32, whose sum over S is x W^T."""
    rows, inputs = x.shape
    outputs = packed.shape[0]
    shape = shape or shape_for(outputs, inputs, rows)
    operands, sizes, deep, tile = _operands(x, packed, shape)
    result = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.values.device)
    per_split = triton.cdiv(triton.cdiv(inputs, deep), shape.splits) * deep
    grid = (triton.cdiv(outputs, shape.outputs), shape.splits, triton.cdiv(rows, tile))
    _linear[grid](*operands, result, rows, outputs, inputs, per_split, **sizes)
    return result


def choose_groups(
    x: IntegerRows, packed: PackedGroups, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
    token_ids: Tensor | None = None, shape: Shape | None = None,
) -> Tensor:  # fmt: skip
    """`choice.choose_rows` with such weights."""
    rows, inputs = x.shape
    outputs = packed.shape[0]
    shape = shape or shape_for(outputs, inputs, rows)
    tiles = triton.cdiv(outputs, shape.outputs)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=x.values.device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=x.values.device)
    operands, sizes, _, tile = _operands(x, packed, shape)
    _best_of_tile[(tiles, triton.cdiv(rows, tile))](
        *operands, inv_temps, seeds, positions, token_ids if token_ids is not None else where, best,
        where, rows, outputs, inputs, tiles, HAS_IDS=token_ids is not None, **sizes,
    )  # fmt: skip
    return best_of_rows(best, where)


def shape_for(outputs: int, inputs: int, rows: int) -> Shape:
    """By rule, from the best cuts on an H200 at 1 to 128 rows (`benchmarks/gpu_quantized.py`)."""
    splits = splits_for(outputs, inputs, least=1024)
    return Shape(64, 512 if rows <= _MOST_STACKED else 256, splits, warps=4, stages=3)


def _operands(
    x: IntegerRows, packed: PackedGroups, shape: Shape
) -> tuple[tuple[Any, ...], dict[str, Any], int, int]:
    """What every kernel here gets, its sizes, inputs of a step, and rows of a tile."""
    assert x.values.is_contiguous() and packed.weight.is_contiguous()
    assert x.group == packed.half
    rows, inputs = x.shape
    deep = max(shape.inputs, packed.half * 8 // packed.bits)
    is_stacked = rows <= _MOST_STACKED
    lines = shape.rows or tile_rows(2 * rows if is_stacked else rows, TILE_ROWS)
    sizes = {
        "GROUP": packed.group, "HALF": packed.half, "IS_PACKED": packed.bits == 4,
        "IS_STACKED": is_stacked, "BLOCK_M": lines, "BLOCK_N": shape.outputs, "BLOCK_K": deep,
        "IS_EVEN": inputs % deep == 0, "num_warps": shape.warps, "num_stages": shape.stages,
    }  # fmt: skip
    operands = (x.values, x.scales, x.sums, packed.weight, packed.scales, packed.zeros)
    return operands, sizes, deep, lines // 2 if is_stacked else lines


@jit
def _add_group(sums, w, x, x_scales, x_sums, scales, zeros, first, first_row, rows, column, outputs,
               inputs, GROUP: tl.constexpr, HALF: tl.constexpr, IS_PACKED: tl.constexpr,
               IS_STACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               IS_EVEN: tl.constexpr):  # fmt: skip
    """sums and what weights w [BLOCK_N, HALF] of the inputs from number `first` on add to them."""
    columns = column + tl.arange(0, BLOCK_N)
    is_output = columns < outputs
    lines = 2 * rows
    line = 2 * first_row + tl.arange(0, BLOCK_M)
    if not IS_STACKED:
        line += tl.arange(0, BLOCK_M) + 1  # of what the first integers left
    is_line = line < lines
    if not IS_EVEN:
        is_output = is_output & (columns * 0 + first < inputs)
        is_line = is_line & (line * 0 + first < inputs)
    at = first // GROUP * outputs + columns
    x_at = first // HALF * lines + line
    gain = tl.load(scales + at, is_output, 0.0).to(tl.float32)
    size = tl.load(x_scales + x_at, is_line, 0.0)
    if IS_STACKED:
        v = codes_of(x, 2 * first_row, first, lines, inputs, 1, BLOCK_M, HALF, IS_EVEN)
        whole = tl.dot(w, v.T, out_dtype=tl.int32)
    else:
        near = codes_of(x, 2 * first_row, first, lines, inputs, 2, BLOCK_M, HALF, IS_EVEN)
        fine = codes_of(x, 2 * first_row + 1, first, lines, inputs, 2, BLOCK_M, HALF, IS_EVEN)
        whole = tl.dot(w, near.T, out_dtype=tl.int32) << 8
        whole = tl.dot(w, fine.T, whole, out_dtype=tl.int32)
    part = whole.to(tl.float32)
    if IS_PACKED:
        size *= 1.0 / 16
    if zeros is not None:
        zero = tl.load(zeros + at, is_output, 0).to(tl.float32)
        if IS_PACKED:
            zero *= 16.0
        total = tl.load(x_sums + x_at, is_line, 0.0)
        if not IS_STACKED:
            total += tl.load(x_sums + x_at - 1, is_line, 0.0) * FINE
        part -= zero[:, None] * total[None, :]
    return sums + part * (gain[:, None] * size[None, :])


@jit
def _product_tile(x, x_scales, x_sums, weight, scales, zeros, first_row, rows, column, outputs,
                  inputs, start, stop, GROUP: tl.constexpr, HALF: tl.constexpr,
                  IS_PACKED: tl.constexpr, IS_STACKED: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """[BLOCK_N, rows of the tile]: outputs from `column` on, of rows from `first_row` on."""
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in range(start, stop, BLOCK_K):
        if IS_PACKED:
            for part in tl.static_range(BLOCK_K // (2 * HALF)):
                first = begin + part * 2 * HALF
                packed = codes_of(weight, column, first // 2, outputs, inputs // 2, 1, BLOCK_N,
                                  HALF, IS_EVEN)  # fmt: skip
                low, high = halves(packed)
                sums = _add_group(sums, low, x, x_scales, x_sums, scales, zeros, first, first_row,
                                  rows, column, outputs, inputs, GROUP, HALF, True, IS_STACKED,
                                  BLOCK_M, BLOCK_N, IS_EVEN)  # fmt: skip
                sums = _add_group(sums, high, x, x_scales, x_sums, scales, zeros, first + HALF,
                                  first_row, rows, column, outputs, inputs, GROUP, HALF, True,
                                  IS_STACKED, BLOCK_M, BLOCK_N, IS_EVEN)  # fmt: skip
        else:
            for part in tl.static_range(BLOCK_K // HALF):
                first = begin + part * HALF
                w = codes_of(weight, column, first, outputs, inputs, 1, BLOCK_N, HALF, IS_EVEN)
                sums = _add_group(sums, w, x, x_scales, x_sums, scales, zeros, first, first_row,
                                  rows, column, outputs, inputs, GROUP, HALF, False, IS_STACKED,
                                  BLOCK_M, BLOCK_N, IS_EVEN)  # fmt: skip
    if IS_STACKED:
        sums = tl.sum(tl.reshape(sums, (BLOCK_N, BLOCK_M // 2, 2)), 2)
    return sums


@jit(do_not_specialize=["rows"])
def _linear(x, x_scales, x_sums, weight, scales, zeros, result, rows, outputs, inputs, per_split,
            GROUP: tl.constexpr, HALF: tl.constexpr, IS_PACKED: tl.constexpr,
            IS_STACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    EACH: tl.constexpr = BLOCK_M // 2 if IS_STACKED else BLOCK_M
    column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    first_row = tl.program_id(2) * EACH
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    sums = _product_tile(
        x, x_scales, x_sums, weight, scales, zeros, first_row, rows, column, outputs, inputs, start,
        stop, GROUP, HALF, IS_PACKED, IS_STACKED, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN,
    )  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, EACH)
    where = (split * rows + row[None, :]) * outputs + columns[:, None]
    tl.store(result + where, sums, (columns[:, None] < outputs) & (row[None, :] < rows))


@jit(do_not_specialize=["rows"])
def _best_of_tile(x, x_scales, x_sums, weight, scales, zeros, inv_temps, seeds, positions, ids,
                  best, where, rows, outputs, inputs, tiles, HAS_IDS: tl.constexpr,
                  GROUP: tl.constexpr, HALF: tl.constexpr, IS_PACKED: tl.constexpr,
                  IS_STACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    EACH: tl.constexpr = BLOCK_M // 2 if IS_STACKED else BLOCK_M
    tile = tl.program_id(0)
    column = tile * BLOCK_N
    first_row = tl.program_id(1) * EACH
    logits = _product_tile(
        x, x_scales, x_sums, weight, scales, zeros, first_row, rows, column, outputs, inputs, 0,
        inputs, GROUP, HALF, IS_PACKED, IS_STACKED, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN,
    )  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, EACH)
    best_of_values(
        logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs, tiles,
        tile, HAS_IDS,
    )  # fmt: skip
