"""Products of a few rows with float32 weights, 32 outputs at a time.

Every output adds up its inputs one after another, whatever rows come along, so a row gets the same
bits alone and among others. Weights are read once for up to eight rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch.nn.functional import pad

from headstart.backends.numba.calls import (
    ADDS,
    BIAS,
    FIELDS,
    OUTPUTS,
    WEIGHTS,
    WIDTH,
    WRITES_ON,
    Product,
    aligned_empty,
    floats_at,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.sums import BLOCKS, MOST_ROWS, TILE
from headstart.backends.numba.thread_pool import COUNTERS, claim_tiles, finish, wait
from headstart.backends.numba.vectors import LANES, VECTOR, broadcast, fma, load, loop, prefetch

_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_LINE = 64  # bytes that memory gives at a time
_AHEAD = 4096  # bytes, as far as weights are asked for before they are needed


def pack(weight: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] -> [tiles, K * 32], in the order in which a product reads."""
    filled = pad(weight, (0, 0, 0, -weight.shape[0] % TILE))
    ordered = filled.view(-1, TILE, filled.shape[1]).transpose(1, 2)
    packed = aligned_empty(4 * filled.numel()).view(np.float32).reshape(ordered.shape[0], -1)
    packed.reshape(ordered.shape)[...] = ordered.numpy()
    return torch.from_numpy(packed)


def unpack(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """The opposite of `pack`."""
    return by_output(packed).reshape(packed.shape[0] * TILE, -1)[:outputs]


def by_output(packed: torch.Tensor) -> torch.Tensor:
    """The same memory as [tiles, lanes, K]: `lane_of` says where an output is."""
    return packed.view(packed.shape[0], -1, TILE).transpose(1, 2)


def unpack_rows(packed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Some outputs [n, K] of what was packed."""
    return by_output(packed)[ids // TILE, ids % TILE]


def lane_of(output: int) -> tuple[int, int]:
    return divmod(output, TILE)


def _for_rows(rows: int) -> Any:
    """The sums of a tile for so many rows."""

    @intrinsic
    def sums(typing: Any, weights: Any, inputs: Any, stride: Any, count: Any, out: Any) -> Any:
        """Addresses of a tile, of the first row, of out [rows, TILE]; stride in bytes."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            weights, inputs, stride, count, out = arguments
            firsts = [build.add(inputs, build.mul(stride, _INT64(row))) for row in range(rows)]

            def add(number: Any, totals: list[Any]) -> list[Any]:
                at = build.add(weights, build.mul(number, _INT64(4 * TILE)))
                for line in range(0, 4 * TILE, _LINE):
                    prefetch(build, build.add(at, _INT64(_AHEAD + line)))
                tile = [
                    load(build, build.add(at, _INT64(4 * LANES * block)), VECTOR)
                    for block in range(BLOCKS)
                ]
                offset = build.mul(number, _INT64(4))
                values = [
                    broadcast(build, load(build, build.add(first, offset), _FLOAT))
                    for first in firsts
                ]
                pairs = [(value, part) for value in values for part in tile]
                return [fma(build, *pair, total) for pair, total in zip(pairs, totals, strict=True)]

            nothing = [ir.Constant(VECTOR, None)] * (rows * BLOCKS)
            for number, result in enumerate(loop(build, count, nothing, add)):
                place = build.add(out, _INT64(4 * LANES * number))
                build.store(result, build.inttoptr(place, VECTOR.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return sums


_one, _two, _three, _four, _five, _six, _seven, _eight = map(_for_rows, range(1, MOST_ROWS + 1))


@njit()
def _add_up(tile, inputs, first, out):
    """tile [K * TILE], inputs [rows, K] -> out [8, TILE]: of the rows from `first` on as many as
    fit; returns how many those are."""
    weights, sums, begin = tile.ctypes.data, out.ctypes.data, inputs[first:].ctypes.data
    rows, width = inputs.shape
    stride, count = inputs.strides[0], min(rows - first, MOST_ROWS)
    if count == 8:
        _eight(weights, begin, stride, width, sums)
    elif count == 7:
        _seven(weights, begin, stride, width, sums)
    elif count == 6:
        _six(weights, begin, stride, width, sums)
    elif count == 5:
        _five(weights, begin, stride, width, sums)
    elif count == 4:
        _four(weights, begin, stride, width, sums)
    elif count == 3:
        _three(weights, begin, stride, width, sums)
    elif count == 2:
        _two(weights, begin, stride, width, sums)
    else:
        _one(weights, begin, stride, width, sums)
    return count


@njit()
def product(counters, phase, packed, bias, inputs, out, adds, waits):
    """out [rows, N] = inputs W^T + bias, or that in addition to what is there: one phase."""
    tiles, outputs = packed.shape[0], out.shape[1]
    sums = np.empty((MOST_ROWS, TILE), np.float32)
    while True:
        begin, end = claim_tiles(counters, phase, tiles)
        if begin >= tiles:
            break
        for number in range(begin, end):
            start = number * TILE
            width, first = min(TILE, outputs - start), 0
            while first < inputs.shape[0]:
                count = _add_up(packed[number], inputs, first, sums)
                for row in range(count):
                    for n in range(width):
                        value = sums[row, n] + bias[start + n]
                        if adds:
                            value += out[first + row, start + n]
                        out[first + row, start + n] = value
                first += count
        finish(counters, phase, end - begin)
    if waits:
        wait(counters, phase, tiles)


@Product
def float_product(counters, phase, x, rows, matrix, out, mode):
    """`calls.apply` for float32."""
    own = carray(matrix, (FIELDS,))
    width, outputs = own[WIDTH], own[OUTPUTS]
    product(
        carray(counters, (phase + 1, COUNTERS)), phase,
        carray(floats_at(own[WEIGHTS]), (-(-outputs // TILE), width * TILE)),
        carray(floats_at(own[BIAS]), (outputs,)), carray(x, (rows, width)),
        carray(out, (rows, outputs)), mode == ADDS, mode != WRITES_ON,
    )  # fmt: skip
