"""x W^T with int8 weights for a few rows: half the bytes of bf16, on the integer matrix units.

Converting weights to floats on their way would take longer than reading them. So x is written as
integers, too: the nearest 8-bit ones and 8-bit remainders, 16 bits together, which is finer
than bf16. Two integer products and the scales of both sides give the result.

M rows, N outputs, K inputs, S splits. Used by what drafts: no text depends on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.choice import best_of_rows, best_of_values
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.linear import Shape, splits_for, tile_rows
from headstart.backends.cuda.kernels.rows import silu_product

_FINE = tl.constexpr(256.0)  # steps of the remainder per step of the rest

MAX_CHOICES = 32  # rows; with more the two integer products gain nothing over a library in bf16
_CHOOSING_FEW = Shape(outputs=64, inputs=256, stages=3)
_CHOOSING_MORE = Shape(outputs=64, inputs=128, stages=4)


def partial_int8(x: Tensor, weight: Tensor, scales: Tensor, shape: Shape | None = None) -> Tensor:
    """x [M, K], weight [N, K] int8, scales [N] fp32 -> [S, M, N] fp32: `linear.partial_linear`."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    shape = shape or shape_for(outputs, inputs)
    whole, rest, sizes = integers(x)
    result = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
    per_split = triton.cdiv(triton.cdiv(inputs, shape.inputs), shape.splits) * shape.inputs
    tile = tile_rows(rows)
    grid = (triton.cdiv(outputs, shape.outputs), shape.splits, triton.cdiv(rows, tile))
    _linear[grid](
        whole, rest, sizes, weight, scales, result, rows, outputs, inputs, per_split, BLOCK_M=tile,
        BLOCK_N=shape.outputs, BLOCK_K=shape.inputs, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
    return result


def gated_int8(x: Tensor, weight: Tensor, scales: Tensor, shape: Shape | None = None) -> Tensor:
    """`linear.gated_linear` with such weights."""
    shape = shape or replace(shape_for(*weight.shape), splits=1)
    return silu_product(partial_int8(x, weight, scales, shape)[0], x.dtype)


def choose_int8(
    x: Tensor, weight: Tensor, scales: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
    token_ids: Tensor | None = None, shape: Shape | None = None,
) -> Tensor:  # fmt: skip
    """`choice.choose_rows` with such weights."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    shape = shape or (_CHOOSING_FEW if rows <= 16 else _CHOOSING_MORE)
    whole, rest, sizes = integers(x)
    tiles = triton.cdiv(outputs, shape.outputs)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
    tile = tile_rows(rows)
    _best_of_tile[(tiles, triton.cdiv(rows, tile))](
        whole, rest, sizes, weight, scales, inv_temps, seeds, positions,
        token_ids if token_ids is not None else where, best, where, rows, outputs, inputs, tiles,
        BLOCK_M=tile, BLOCK_N=shape.outputs, BLOCK_K=shape.inputs, HAS_IDS=token_ids is not None,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return best_of_rows(best, where)


def shape_for(outputs: int, inputs: int) -> Shape:
    """By rule: enough programs to fill an H200 twice; the best cuts of MiMo-7B's matrices there."""
    return Shape(64, 256, splits_for(outputs, inputs, least=1024), 4, 3)


def integers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] as (whole + rest / 256) * sizes: int8 [M, K] twice, fp32 [M]."""
    rows, inputs = x.shape
    assert x.is_contiguous()
    whole = torch.empty(rows, inputs, dtype=torch.int8, device=x.device)
    rest = torch.empty_like(whole)
    sizes = torch.empty(rows, dtype=torch.float32, device=x.device)
    _integers[(rows,)](
        x, whole, rest, sizes, inputs, BLOCK=triton.next_power_of_2(inputs), num_warps=8
    )
    return whole, rest, sizes


@jit
def _nearest(x):
    """The nearest whole number, halves away from zero."""
    return tl.where(x < 0, -tl.floor(0.5 - x), tl.floor(x + 0.5))


@jit
def _integers(x, whole, rest, sizes, inputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < inputs
    value = tl.load(x + row * inputs + at, mask, 0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(value), 0) / 127.0, 1e-20)
    steps = value / size
    near = _nearest(steps)
    # Remainders lie in half a step either way: 127 instead of 128 is all that is lost.
    fine = tl.minimum(tl.maximum(_nearest((steps - near) * _FINE), -127.0), 127.0)
    tl.store(whole + row * inputs + at, near.to(tl.int8), mask)
    tl.store(rest + row * inputs + at, fine.to(tl.int8), mask)
    tl.store(sizes + row, size)


@jit
def _product_tile(whole, rest, sizes, weight, scales, row, rows, columns, outputs, inputs, start,
                  stop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_M]: the outputs `columns` of the rows `row` over inputs [start, stop)."""
    coarse = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    fine = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    for first in range(start, stop, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        w_mask = (columns[:, None] < outputs) & (inner[None, :] < inputs)
        x_mask = (row[None, :] < rows) & (inner[:, None] < inputs)
        w = tl.load(weight + columns[:, None].to(tl.int64) * inputs + inner[None, :], w_mask, 0)
        where = row[None, :] * inputs + inner[:, None]
        near = tl.load(whole + where, x_mask, 0)
        far = tl.load(rest + where, x_mask, 0)
        coarse = tl.dot(w, near, coarse, out_dtype=tl.int32)
        fine = tl.dot(w, far, fine, out_dtype=tl.int32)
    sums = coarse.to(tl.float32) + fine.to(tl.float32) * (1.0 / _FINE)
    gain = tl.load(scales + columns, columns < outputs, 0.0)
    return sums * gain[:, None] * tl.load(sizes + row, row < rows, 0.0)[None, :]


@jit(do_not_specialize=["rows"])
def _linear(whole, rest, sizes, weight, scales, result, rows, outputs, inputs, per_split,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    sums = _product_tile(
        whole, rest, sizes, weight, scales, row, rows, columns, outputs, inputs, start, stop,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    where = (split * rows + row[None, :]) * outputs + columns[:, None]
    tl.store(result + where, sums, (columns[:, None] < outputs) & (row[None, :] < rows))


@jit(do_not_specialize=["rows"])
def _best_of_tile(whole, rest, sizes, weight, scales, inv_temps, seeds, positions, ids, best, where,
                  rows, outputs, inputs, tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr, HAS_IDS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    logits = _product_tile(
        whole, rest, sizes, weight, scales, row, rows, columns, outputs, inputs, 0, inputs,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    best_of_values(
        logits, columns, row, inv_temps, seeds, positions, ids, best, where, rows, outputs, tiles,
        tile, HAS_IDS,
    )  # fmt: skip
