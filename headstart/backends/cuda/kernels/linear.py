"""x W^T for a few rows: the weights are read once, at memory speed.

A tile holds 16, 32 or 64 rows, so up to that many a program streams its share of W past all of
them. The inner dimension is cut into splits where there are too few output columns to fill a
GPU; partial sums are added in a fixed order by the kernel that reads them, so a result never
depends on timing.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

TILE_ROWS = (16, 32, 64)


def tile_rows(rows: int, sizes: tuple[int, ...] = TILE_ROWS) -> int:
    """Rows of a tile for a product of `rows` rows."""
    return next((size for size in sizes if rows <= size), sizes[-1])


@dataclass(frozen=True)
class Shape:
    """How a product is cut up: outputs per program, inputs per step, splits, warps, stages."""

    outputs: int = 64
    inputs: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    rows: int | None = None  # of a tile; None: by how many there are


# (N, K) -> the cut that was fastest on an H200; benchmarks/gpu_kernels.py measures them.
MEASURED = {
    (6144, 4096): Shape(64, 128, splits=2, warps=4, stages=3),
    (4096, 4096): Shape(64, 128, splits=4, warps=4, stages=3),
    (4096, 11008): Shape(64, 128, splits=2, warps=4, stages=5),
    (4096, 8192): Shape(64, 128, splits=4, warps=4, stages=3),
}


def shape_for(outputs: int, inputs: int) -> Shape:
    """The measured cut, or one by rule: enough programs to fill the GPU twice."""
    if (outputs, inputs) in MEASURED:
        return MEASURED[outputs, inputs]
    return Shape(splits=splits_for(outputs, inputs))


def splits_for(
    outputs: int, inputs: int, *, columns: int = 64, programs: int = 256, least: int = 512
) -> int:
    """Splits of the inner dimension that make enough programs: usually two for every processor.

    A program has so many `columns` of the outputs, and a split at least so many inputs.
    """
    splits = 1
    while outputs // columns * splits < programs and inputs // (splits * 2) >= least:
        splits *= 2
    return splits


def partial_linear(x: Tensor, weight: Tensor, shape: Shape | None = None) -> Tensor:
    """x [M, K], weight [N, K] -> [S, M, N] fp32, whose sum over S is x W^T."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous()
    shape = shape or shape_for(outputs, inputs)
    result = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
    per_split = triton.cdiv(triton.cdiv(inputs, shape.inputs), shape.splits) * shape.inputs
    tile = shape.rows or tile_rows(rows)
    grid = (triton.cdiv(outputs, shape.outputs), shape.splits, triton.cdiv(rows, tile))
    _linear[grid](
        x, weight, result, rows, outputs, inputs, per_split, BLOCK_M=tile,
        BLOCK_N=shape.outputs, BLOCK_K=shape.inputs, IS_EVEN=inputs % shape.inputs == 0,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return result


def gated_linear(x: Tensor, weight: Tensor, shape: Shape | None = None) -> Tensor:
    """silu(x G^T) * (x U^T) [M, N / 2] in x's type; weight [N, K] holds G's rows, then U's."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    assert x.is_contiguous() and weight.is_contiguous()
    shape = shape or Shape(outputs=64, inputs=128, stages=3)
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tile = shape.rows or tile_rows(rows)
    _gated[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, tile))](
        x, weight, result, rows, outputs, inputs, BLOCK_M=tile,
        BLOCK_N=shape.outputs, BLOCK_K=shape.inputs, IS_EVEN=inputs % shape.inputs == 0,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return result


@jit
def product_tile(x, weight, row, rows, columns, outputs, inputs, start, stop,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 IS_EVEN: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_M]: the outputs `columns` of the rows `row` over inputs [start, stop)."""
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for first in range(start, stop, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        if IS_EVEN:
            w_mask = columns[:, None] < outputs
            x_mask = row[None, :] < rows
        else:
            w_mask = (columns[:, None] < outputs) & (inner[None, :] < inputs)
            x_mask = (row[None, :] < rows) & (inner[:, None] < inputs)
        w = tl.load(weight + columns[:, None].to(tl.int64) * inputs + inner[None, :], w_mask, 0.0)
        v = tl.load(x + row[None, :] * inputs + inner[:, None], x_mask, 0.0)
        v = v.to(w.dtype)  # fp32 weights, such as a router's, beside narrower rows
        sums = tl.dot(w, v, sums, input_precision="ieee")
    return sums


@jit(do_not_specialize=["rows"])
def _linear(x, weight, result, rows, outputs, inputs, per_split, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * per_split
    stop = tl.minimum(start + per_split, inputs)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    sums = product_tile(
        x, weight, row, rows, columns, outputs, inputs, start, stop, BLOCK_M, BLOCK_N, BLOCK_K,
        IS_EVEN,
    )  # fmt: skip
    where = (split * rows + row[None, :]) * outputs + columns[:, None]
    tl.store(result + where, sums, (columns[:, None] < outputs) & (row[None, :] < rows))


@jit(do_not_specialize=["rows"])
def _gated(x, weight, result, rows, outputs, inputs, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    is_output = columns[:, None] < outputs
    for first in range(0, inputs, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        if IS_EVEN:
            w_mask = is_output
            x_mask = row[None, :] < rows
        else:
            w_mask = is_output & (inner[None, :] < inputs)
            x_mask = (row[None, :] < rows) & (inner[:, None] < inputs)
        where = columns[:, None].to(tl.int64) * inputs + inner[None, :]
        g = tl.load(weight + where, w_mask, 0.0)
        u = tl.load(weight + outputs.to(tl.int64) * inputs + where, w_mask, 0.0)
        v = tl.load(x + row[None, :] * inputs + inner[:, None], x_mask, 0.0)
        gate = tl.dot(g, v, gate, input_precision="ieee")
        up = tl.dot(u, v, up, input_precision="ieee")
    value = gate * tl.sigmoid(gate) * up
    where = row[None, :] * outputs + columns[:, None]
    tl.store(result + where, value.to(result.dtype.element_ty), is_output & (row[None, :] < rows))
