"""Products of a few rows with int8 weights: rows are rounded to integers, sums are exact.

A row is rounded to int16 with one scale, as finely as its sums with these weights allow: none may
leave 32 bits. Float arithmetic happens once per row and output, and is written out, so a
row gets the same bits alone and among others, whatever the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch.nn.functional import pad

from headstart.backends.numba.calls import (
    ADDS,
    BIAS,
    DETAIL,
    FIELDS,
    OUTPUTS,
    SCALES,
    WEIGHTS,
    WIDTH,
    WRITES_ON,
    Product,
    aligned_empty,
    floats_at,
    int8_at,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import ROUNDING, bits_of, float_of
from headstart.backends.numba.sums import BLOCKS, MOST_ROWS, TILE, add_up
from headstart.backends.numba.thread_pool import COUNTERS, claim_tiles, finish, wait
from headstart.backends.numba.vectors import LANES

_LARGEST_SUM = 2**31 - 1
_LARGEST_INPUT = 2**15 - 1


def pack(weight: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] -> [tiles, bytes], in the order in which a product reads; filled with zeros."""
    outputs, inputs = weight.shape
    filled = pad(weight, (0, inputs % 2, 0, -outputs % TILE))
    parts = filled.view(-1, BLOCKS, LANES, filled.shape[1] // 2, 2)
    ordered = parts.permute(0, 3, 1, 2, 4)
    packed = aligned_empty(filled.numel()).view(np.int8).reshape(parts.shape[0], -1)
    packed.reshape(ordered.shape)[...] = ordered.numpy()
    return torch.from_numpy(packed)


def unpack(packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The opposite of `pack`."""
    return by_output(packed).reshape(packed.shape[0] * TILE, -1)[:outputs, :inputs]


def by_output(packed: torch.Tensor) -> torch.Tensor:
    """The same memory as [tiles, blocks, lanes, pairs, 2]: `lane_of` says where an output is."""
    return packed.view(packed.shape[0], -1, BLOCKS, LANES, 2).permute(0, 2, 3, 1, 4)


def lane_of(output: int) -> tuple[int, int, int]:
    tile, rest = divmod(output, TILE)
    return tile, *divmod(rest, LANES)


def unpack_rows(packed: torch.Tensor, ids: torch.Tensor, inputs: int) -> torch.Tensor:
    """Some outputs [n, K] of what was packed."""
    rest = ids % TILE
    return by_output(packed)[ids // TILE, rest // LANES, rest % LANES].flatten(1)[:, :inputs]


def most_levels(weight: torch.Tensor) -> int:
    """The largest integer that inputs may have: the largest sum then still fits."""
    # Of -128 an int8 has no absolute value.
    most = max(1, int(weight.to(torch.int16).abs().sum(dim=1, dtype=torch.int64).max()))
    return min(_LARGEST_INPUT, _LARGEST_SUM // most)


@njit()
def _largest(row):
    """Of absolute values: without their sign, bits have the order of the numbers."""
    found = np.int32(0)
    for i in range(row.shape[0]):
        size = np.int32(bits_of(row[i]) & np.int32(0x7FFFFFFF))
        found = size if size > found else found
    return float_of(found)


@njit()
def round_row(row, levels, out):
    """row [K] -> out [K or one more] int16 within +-levels; returns its scale."""
    largest = _largest(row)
    if largest == 0:
        for k in range(out.shape[0]):
            out[k] = 0
        return np.float32(0)
    factor = np.float32(levels) / largest
    for k in range(row.shape[0]):
        out[k] = np.int16(bits_of(row[k] * factor + ROUNDING))
    for k in range(row.shape[0], out.shape[0]):
        out[k] = 0
    return largest / np.float32(levels)


@njit()
def product(counters, phase, packed, scales, bias, inputs, input_scales, out, adds, waits):
    """out [rows, N] = inputs W^T + bias, or that in addition to what is there: one phase."""
    tiles, outputs = packed.shape[0], out.shape[1]
    sums = np.empty((MOST_ROWS, TILE), np.int32)
    while True:
        begin, end = claim_tiles(counters, phase, tiles)
        if begin >= tiles:
            break
        for number in range(begin, end):
            start = number * TILE
            stop = min(start + TILE, outputs)
            first = 0
            while first < inputs.shape[0]:
                count = add_up(packed[number], inputs, first, sums)
                for row in range(count):
                    _finish(
                        sums[row], input_scales[first + row], scales[start:stop],
                        bias[start:stop], out[first + row, start:stop], adds,
                    )  # fmt: skip
                first += count
        finish(counters, phase, end - begin)
    if waits:
        wait(counters, phase, tiles)


@njit()
def _finish(sums, input_scale, scales, bias, out, adds):
    if adds:
        for n in range(out.shape[0]):
            out[n] = out[n] + (np.float32(sums[n]) * (input_scale * scales[n]) + bias[n])
    else:
        for n in range(out.shape[0]):
            out[n] = np.float32(sums[n]) * (input_scale * scales[n]) + bias[n]


@njit()
def round_rows(x, levels):
    """x [rows, K] -> int16 [rows, K or one more] and scales [rows]."""
    rows, width = x.shape
    inputs = np.empty((rows, width + width % 2), np.int16)
    scales = np.empty(rows, np.float32)
    for row in range(rows):
        scales[row] = round_row(x[row], levels, inputs[row])
    return inputs, scales


@Product
def int8_product(counters, phase, x, rows, matrix, out, mode):
    """`calls.apply` for int8: DETAIL is the largest integer that inputs may have."""
    own = carray(matrix, (FIELDS,))
    width, outputs = own[WIDTH], own[OUTPUTS]
    tiles = -(-outputs // TILE)
    inputs, input_scales = round_rows(carray(x, (rows, width)), own[DETAIL])
    product(
        carray(counters, (phase + 1, COUNTERS)), phase,
        carray(int8_at(own[WEIGHTS]), (tiles, (width + width % 2) * TILE)),
        carray(floats_at(own[SCALES]), (outputs,)), carray(floats_at(own[BIAS]), (outputs,)),
        inputs, input_scales, carray(out, (rows, outputs)), mode == ADDS,
        mode != WRITES_ON,
    )  # fmt: skip
