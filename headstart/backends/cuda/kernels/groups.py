"""x W^T with weights of 4 or 8 bits in groups of inputs, on the integer matrix units.

Weights of 4 bits become bytes in registers, a shift and a mask for four of them; floats would take
several times as many instructions. So that nothing has to change places, a byte holds two inputs
that lie `half` apart (`planar`), each minus 8: both halves of a tile are multiplied by themselves.
Rows are pairs of integer rows (`eight_bits.py`). The sums of a group are exact and get the scales
of both sides; a zero point takes itself times the sum of the row's integers from them.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.choice import best_of_rows, best_of_values
from headstart.backends.cuda.kernels.eight_bits import FINE, IntegerRows
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, splits_for, tile_rows

TILE_ROWS = (16, 32, 64)
# Up to so many rows both integers of a row are rows of a product, which takes fewer instructions;
# with more there would be too many sums.
_MOST_STACKED = 16
_HALVES = (128, 64, 32)
_ROWS = 4096  # repacked at a time
# On an H200 matrices of 7B models were faster so up to 128 rows, and as copies in bf16 at 320.
MAX_ROWS = 192
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class PackedGroups:
    """W [N, K] as kernels read it: W[n, k] = (q - zero) * scale of its group.

    weight int8: for 4 bits [N, K / 2], bytes of two inputs `half` apart, for 8 bits [N, K], each
    code less 8 or 128; scales [K / G, N]; zeros [K / G, N] int8, less the same, or None. Rows are
    rounded in groups of `half`.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    half: int

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.weight.shape
        return outputs, width * 8 // self.bits

    def rows(self, rows: slice | Tensor) -> PackedGroups:
        """The same of some outputs."""
        zeros = None if self.zeros is None else self.zeros[:, rows].contiguous()
        scales = self.scales[:, rows].contiguous()
        return replace(self, weight=self.weight[rows].contiguous(), scales=scales, zeros=zeros)


def packed_groups(weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedGroups:
    """From codes as they are held: uint8 [N, K / 2], even inputs low, or [N, K]; [N, K / G]."""
    outputs, groups = scales.shape
    inputs = weight.shape[1] * 8 // bits
    group, moved = inputs // groups, 1 << (bits - 1)
    half = half_for(inputs, group, bits)
    assert half is not None, "other groups are refused"
    if bits == 4:
        packed = torch.empty_like(weight)
        for start in range(0, outputs, _ROWS):
            packed[start : start + _ROWS] = planar(weight[start : start + _ROWS], half)
    else:
        packed = weight ^ moved
    if zeros is not None:
        zeros = (zeros.t().to(torch.int16) - moved).to(torch.int8).contiguous()
    return PackedGroups(packed.view(torch.int8), scales.t().contiguous(), zeros, bits, group, half)


def half_for(inputs: int, group: int, bits: int) -> int | None:
    """Inputs of a matrix that are multiplied together; None where groups are too small for it."""
    tile = 8 // bits  # halves of it
    fits = (half for half in _HALVES if group % half == 0 and inputs % (tile * half) == 0)
    return next(fits, None)


def planar(weight: Tensor, half: int) -> Tensor:
    """uint8 [N, K / 2] with neighbours in a byte -> with inputs `half` apart, each minus 8."""
    codes = torch.stack([weight & 15, weight >> 4], 2) ^ 8  # minus 8, in 4 bits
    low, high = codes.view(len(weight), -1, 2, half).unbind(2)
    return (low | (high << 4)).flatten(1)


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


def dequantized_groups(packed: PackedGroups, dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`, for products of many rows by a library."""
    outputs, inputs = packed.shape
    result = torch.empty(outputs, inputs, dtype=dtype, device=packed.weight.device)
    grid = (triton.cdiv(outputs, 64), triton.cdiv(packed.weight.shape[1], packed.half))
    _dequantize[grid](
        packed.weight, packed.scales, packed.zeros, result, outputs, inputs, GROUP=packed.group,
        HALF=packed.half, IS_PACKED=packed.bits == 4, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return result


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
def halves(packed):
    """Bytes of two 4-bit numbers -> both, 16 times each, as bytes."""
    if _IS_INTERPRETED:
        low = (packed << 4).to(tl.int8)
        high = (packed & -16).to(tl.int8)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0;"
            " and.b32 $1, $2, 0xF0F0F0F0; }",
            "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@jit
def _bytes(matrix, first_line, first, lines, width, EVERY: tl.constexpr, LINES: tl.constexpr,
           WIDE: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """[LINES, WIDE] of a matrix with `lines` lines of `width` bytes; zeros outside of it."""
    line = first_line + tl.arange(0, LINES) * EVERY
    inner = first + tl.arange(0, WIDE)
    mask = line[:, None] < lines
    if not IS_EVEN:
        mask = mask & (inner[None, :] < width)
    return tl.load(matrix + line[:, None].to(tl.int64) * width + inner[None, :], mask, 0)


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
        v = _bytes(x, 2 * first_row, first, lines, inputs, 1, BLOCK_M, HALF, IS_EVEN)
        whole = tl.dot(w, v.T, out_dtype=tl.int32)
    else:
        near = _bytes(x, 2 * first_row, first, lines, inputs, 2, BLOCK_M, HALF, IS_EVEN)
        fine = _bytes(x, 2 * first_row + 1, first, lines, inputs, 2, BLOCK_M, HALF, IS_EVEN)
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
                packed = _bytes(weight, column, first // 2, outputs, inputs // 2, 1, BLOCK_N, HALF,
                                IS_EVEN)  # fmt: skip
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
                w = _bytes(weight, column, first, outputs, inputs, 1, BLOCK_N, HALF, IS_EVEN)
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


@jit
def _dequantize(weight, scales, zeros, result, outputs, inputs, GROUP: tl.constexpr,
                HALF: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    first = tl.program_id(1) * HALF
    if IS_PACKED:
        packed = _bytes(weight, column, first, outputs, inputs // 2, 1, BLOCK_N, HALF, True)
        low, high = halves(packed)
        _store_group(low, scales, zeros, result, column, 2 * first, outputs, inputs, 16, GROUP,
                     HALF, BLOCK_N)  # fmt: skip
        _store_group(high, scales, zeros, result, column, 2 * first + HALF, outputs, inputs, 16,
                     GROUP, HALF, BLOCK_N)  # fmt: skip
    else:
        codes = _bytes(weight, column, first, outputs, inputs, 1, BLOCK_N, HALF, True)
        _store_group(codes, scales, zeros, result, column, first, outputs, inputs, 1, GROUP, HALF,
                     BLOCK_N)  # fmt: skip


@jit
def _store_group(codes, scales, zeros, result, column, first, outputs, inputs, steps,
                 GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    inner = first + tl.arange(0, WIDTH)
    mask = (columns[:, None] < outputs) & (inner[None, :] < inputs)
    at = inner[None, :] // GROUP * outputs + columns[:, None]
    value = codes.to(tl.float32) / steps
    if zeros is not None:
        value -= tl.load(zeros + at, mask, 0).to(tl.float32)
    value *= tl.load(scales + at, mask, 0.0).to(tl.float32)
    target = result + columns[:, None].to(tl.int64) * inputs + inner[None, :]
    tl.store(target, value.to(result.dtype.element_ty), mask)
