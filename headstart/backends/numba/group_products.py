"""Products of a few rows with weights of 4 bits in groups, as `models/quantized.py` holds them.

A row is rounded to int8 with one scale per group or part of a larger group, a part's sum is exact,
and the parts are added up in order: a row gets the same bits alone and among others, whatever the
number of threads.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from numba import carray
from torch.nn.functional import pad

from headstart.backends.numba.calls import (
    ADDS,
    BIAS,
    DETAIL,
    FIELDS,
    ORDER,
    OUTPUTS,
    SCALES,
    WEIGHTS,
    WIDTH,
    WRITES_ON,
    Product,
    aligned_empty,
    bytes_at,
    floats_at,
    int32_at,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.group_sums import (
    HEADER,
    LINE,
    MIDDLE,
    POINTS,
    TOGETHER,
    UPPER,
    for_rows,
    round_row,
)
from headstart.backends.numba.rows import gathered
from headstart.backends.numba.sums import BLOCKS, MOST_ROWS, TILE
from headstart.backends.numba.thread_pool import COUNTERS, claim_tiles, finish, wait
from headstart.backends.numba.tiles import filled_up, half_scales, in_tiles, out_of_tiles
from headstart.backends.numba.vectors import LANES
from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles

_PARTS = (64, 32)  # inputs that are rounded together: larger groups are cut
# In DETAIL above a group's size: that of its parts, and the bytes of a tile's zero points.
_PART_AT, _POINTS_AT = 24, 32


def part_of(group_size: int) -> int | None:
    """Into what groups of that size are cut; None where the kernels cannot read them."""
    return next((size for size in _PARTS if group_size % size == 0), None)


def takes(weight: GroupWeight) -> bool:
    """Whether the kernels can read them."""
    return weight.bits == 4 and part_of(weight.group_size) is not None


def detail_of(group: int, part: int, points: int) -> int:
    """What a product has to know of a matrix beside its sizes."""
    return group | part << _PART_AT | points << _POINTS_AT


def points_bytes(groups: int) -> int:
    """Of a tile's zero points."""
    return filled_up(groups * POINTS)


def pack(weight: GroupWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [tiles, bytes] in the order in which a product reads, and a factor per output."""
    outputs, inputs = weight.shape
    fill, groups = (0, 0, 0, -outputs % TILE), weight.scales.shape[-1]
    group = inputs // groups
    scales, factors = half_scales(pad(weight.scales.float(), fill))
    begin = 0 if weight.zeros is None else points_bytes(groups)
    sizes = (len(scales) // TILE, groups, HEADER + group // TOGETHER * LINE)
    packed = aligned_empty(sizes[0] * (begin + prod(sizes[1:]))).reshape(sizes[0], -1)
    if weight.zeros is not None:
        lower, upper = in_tiles(pad(weight.zeros, fill)).split(LANES, dim=2)
        packed[:, :begin] = 0
        packed[:, : groups * POINTS] = (lower | (upper << 4)).flatten(1).numpy()
    parts = packed[:, begin:].reshape(sizes)
    parts[..., :HEADER] = _bytes(in_tiles(scales))
    codes = pad(weight.codes(), fill).view(-1, BLOCKS, LANES, groups, group // TOGETHER, TOGETHER)
    lower, upper = codes.permute(1, 0, 3, 4, 2, 5)
    lines = lower | (upper << 4)
    parts[..., HEADER:] = lines.reshape(*sizes[:2], -1).numpy()
    factors = (factors.view(-1, TILE) / _sizes()).flatten()
    return torch.from_numpy(packed), factors[:outputs].contiguous()


def unpack(
    packed: torch.Tensor, factors: torch.Tensor, inputs: int, group: int, *, has_zeros: bool
) -> GroupWeight:
    """The opposite of `pack`, with scales in float32."""
    outputs, groups = len(factors), inputs // group
    begin = points_bytes(groups) if has_zeros else 0
    parts = packed[:, begin:].reshape(len(packed), groups, -1)
    lines = parts[..., HEADER:].reshape(len(packed), groups, -1, LANES, TOGETHER)
    codes = torch.stack([lines & 15, lines >> 4]).permute(1, 0, 4, 2, 3, 5).reshape(-1, inputs)
    scales = out_of_tiles(parts[..., :HEADER].contiguous().view(torch.float16)).float()[:outputs]
    scales *= (factors * _sizes().repeat(len(packed))[:outputs])[:, None]
    zeros = None
    if has_zeros:
        points = packed[:, : groups * POINTS].reshape(len(packed), groups, POINTS)
        zeros = out_of_tiles(torch.cat([points & 15, points >> 4], dim=2))[:outputs]
    return GroupWeight(4, pack_nibbles(codes[:outputs]), scales, zeros)


def _bytes(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


def _sizes() -> torch.Tensor:
    """How large sums of a tile's outputs are, as multiples of what they should be [32]."""
    return torch.tensor([1.0, UPPER]).repeat_interleave(LANES)


@njit()
def round_parts(x, part, inputs, scales, sums):
    """x [rows, K] -> inputs int8 [rows, K], by parts: their scales, and the sums of integers."""
    for row in range(x.shape[0]):
        round_row(
            x[row:].ctypes.data, inputs[row:].ctypes.data, scales[row:].ctypes.data,
            sums[row:].ctypes.data, scales.shape[1], part // LANES,
        )  # fmt: skip


_one, _two, _three, _four, _five, _six, _seven, _eight = map(for_rows, range(1, MOST_ROWS + 1))


@njit()
def _add_up(tile, zeros, step, inputs, scales, sums, first, groups, out):
    """Of the rows from `first` on as many as fit, out [8, TILE]; returns how many those are."""
    begin, to = inputs[first:].ctypes.data, out.ctypes.data
    width, parts = inputs.shape[1], scales.shape[1] // groups
    lines = width // (scales.shape[1] * TOGETHER)
    x_scales, x_sums = scales[first:].ctypes.data, sums[first:].ctypes.data
    count = min(inputs.shape[0] - first, MOST_ROWS)
    if count == 8:
        _eight(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    elif count == 7:
        _seven(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    elif count == 6:
        _six(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    elif count == 5:
        _five(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    elif count == 4:
        _four(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    elif count == 3:
        _three(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    elif count == 2:
        _two(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    else:
        _one(tile, zeros, step, begin, width, x_scales, x_sums, groups, parts, lines, to)
    return count


@njit()
def product(
    counters, phase, packed, points, factors, bias, groups, inputs, scales, sums, out, adds, waits,
):  # fmt: skip
    """out [rows, N] = inputs W^T + bias, or that in addition to what is there: one phase."""
    tiles, outputs = packed.shape[0], out.shape[1]
    middles = np.full(POINTS, MIDDLE * (1 + UPPER), np.uint8)  # where no zero points are stored
    step = POINTS if points > 0 else 0
    found = np.empty((MOST_ROWS, TILE), np.float32)
    while True:
        begin, end = claim_tiles(counters, phase, tiles)
        if begin >= tiles:
            break
        for number in range(begin, end):
            tile = packed[number, points:].ctypes.data
            zeros = packed[number].ctypes.data if points > 0 else middles.ctypes.data
            start = number * TILE
            width, first = min(TILE, outputs - start), 0
            while first < inputs.shape[0]:
                count = _add_up(tile, zeros, step, inputs, scales, sums, first, groups, found)
                for row in range(count):
                    to = out[first + row, start : start + width]
                    for n in range(width):
                        value = found[row, n] * factors[start + n] + bias[start + n]
                        to[n] = to[n] + value if adds else value
                first += count
        finish(counters, phase, end - begin)
    if waits:
        wait(counters, phase, tiles)


@Product
def group_product(counters, phase, x, rows, matrix, out, mode):
    """`calls.apply` for 4 bits in groups: DETAIL as `detail_of` makes it."""
    own = carray(matrix, (FIELDS,))
    width, outputs, detail = own[WIDTH], own[OUTPUTS], own[DETAIL]
    group, part = detail & ((1 << _PART_AT) - 1), (detail >> _PART_AT) & 0xFF
    points = detail >> _POINTS_AT
    groups, parts = width // group, width // part
    given = carray(x, (rows, width))
    if own[ORDER]:
        given = gathered(given, carray(int32_at(own[ORDER]), (width,)))
    inputs = np.empty((rows, width), np.int8)
    scales, sums = np.empty((rows, parts), np.float32), np.empty((rows, parts), np.int32)
    round_parts(given, part, inputs, scales, sums)
    tile = points + groups * (HEADER + group // TOGETHER * LINE)
    product(
        carray(counters, (phase + 1, COUNTERS)), phase,
        carray(bytes_at(own[WEIGHTS]), (-(-outputs // TILE), tile)), points,
        carray(floats_at(own[SCALES]), (outputs,)), carray(floats_at(own[BIAS]), (outputs,)),
        groups, inputs, scales, sums, carray(out, (rows, outputs)), mode == ADDS,
        mode != WRITES_ON,
    )  # fmt: skip
