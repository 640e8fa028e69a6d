"""Tiles of products of 8-bit floats: how they are fetched, scaled and added up.

Weights are e4m3 with one scale per output, or per block of 128 x 128; rows as `eight_bits.py`
makes them. `fp8_products.py` has the kernels.
"""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit

BLOCK = 128  # outputs and inputs that share a scale, where weights have blocks
_BLOCK = tl.constexpr(BLOCK)


@jit
def matrix_tile(matrix, first_line, first, lines, inputs, STREAMS: tl.constexpr,
                LINES: tl.constexpr, DEEP: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """[LINES, DEEP] of a matrix with `lines` lines of `inputs` numbers; zeros outside of it."""
    if STREAMS:
        tile = matrix.load([first_line, first])
    else:
        line = first_line + tl.arange(0, LINES)
        inner = first + tl.arange(0, DEEP)
        mask = line[:, None] < lines
        if not IS_EVEN:
            mask = mask & (inner[None, :] < inputs)
        where = line[:, None].to(tl.int64) * inputs + inner[None, :]
        tile = tl.load(matrix + where, mask, 0.0)
    return tile


@jit
def step_scale(x_scales, scales, first, first_row, rows, column, outputs, inputs,
               GROUP: tl.constexpr, IS_BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr,
               IS_EVEN: tl.constexpr):  # fmt: skip
    """Of the inputs from number `first` on: [BLOCK_M], of rows and of the block of weights."""
    row = first_row + tl.arange(0, BLOCK_M)
    mask = row < rows
    if not IS_EVEN:
        mask = mask & (row * 0 + first < inputs)
    scale = tl.load(x_scales + first // GROUP * rows + row, mask, 0.0)
    if IS_BLOCKED:
        # Of a step beyond the matrix the last block's is loaded: its numbers are zeros.
        at = tl.minimum(column, outputs - 1) // _BLOCK * tl.cdiv(inputs, _BLOCK)
        scale = scale * tl.load(scales + at + tl.minimum(first, inputs - 1) // _BLOCK)
    return scale


@jit
def whole_scale(sums, x_scales, scales, first_row, rows, column, outputs, GROUP: tl.constexpr,
                IS_BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """sums [BLOCK_N, BLOCK_M] times what no step has been multiplied by."""
    if not IS_BLOCKED:
        columns = column + tl.arange(0, BLOCK_N)
        sums *= tl.load(scales + columns, columns < outputs, 0.0)[:, None]
    if GROUP == 0:
        row = first_row + tl.arange(0, BLOCK_M)
        sums *= tl.load(x_scales + row, row < rows, 0.0)[None, :]
    return sums


@jit
def product_tile(x, x_scales, weight, scales, first_row, rows, column, outputs, inputs, start, stop,
                 GROUP: tl.constexpr, IS_BLOCKED: tl.constexpr, STREAMS: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 DEEP: tl.constexpr, IS_EVEN: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_M]: outputs from `column` on, of rows from `first_row` on."""
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in range(start, stop, BLOCK_K):
        for part in tl.static_range(BLOCK_K // DEEP):
            first = begin + part * DEEP
            w = matrix_tile(weight, column, first, outputs, inputs, STREAMS, BLOCK_N, DEEP, IS_EVEN)
            v = matrix_tile(x, first_row, first, rows, inputs, STREAMS, BLOCK_M, DEEP, IS_EVEN)
            if GROUP:
                scale = step_scale(
                    x_scales, scales, first, first_row, rows, column, outputs, inputs, GROUP,
                    IS_BLOCKED, BLOCK_M, IS_EVEN,
                )  # fmt: skip
                sums += tl.dot(w, v.T, max_num_imprecise_acc=DEEP) * scale[None, :]
            else:
                sums = tl.dot(w, v.T, sums, max_num_imprecise_acc=DEEP)
    return whole_scale(
        sums, x_scales, scales, first_row, rows, column, outputs, GROUP, IS_BLOCKED, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
