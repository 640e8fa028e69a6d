"""Products of a few rows with weights of 4 bits in groups, as `models/quantized.py` holds them.

A row is rounded to int8 with one scale per group, a group's sum is exact, and the groups are added
up in order: a row gets the same bits alone and among others, whatever the number of threads.
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
    TOGETHER,
    UPPER,
    for_rows,
    round_row,
)
from headstart.backends.numba.sums import BLOCKS, MOST_ROWS, TILE
from headstart.backends.numba.thread_pool import COUNTERS, claim_tiles, finish, wait
from headstart.backends.numba.vectors import LANES
from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles

_GROUPS = (64, 32)  # inputs that are rounded together: larger groups are cut
_LARGEST_EXPONENT = 15  # of a float16 scale: smaller ones then keep all their bits
_HAS_ZEROS = 1 << 32  # in DETAIL, beside the group's size


def packed_group(group_size: int) -> int | None:
    """Into what groups of that size are cut; None where the kernels cannot read them."""
    return next((size for size in _GROUPS if group_size % size == 0), None)


def detail_of(group: int, *, has_zeros: bool) -> int:
    """What a product has to know of a matrix beside its sizes."""
    return group + (_HAS_ZEROS if has_zeros else 0)


def pack(weight: GroupWeight, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [tiles, bytes] in the order in which a product reads, and a factor per output.

    Scales become float16 times a power of two, which is their output's factor: those of 16 bits
    keep their values.
    """
    outputs, inputs = weight.shape
    fill = (0, 0, 0, -outputs % TILE)
    times, groups = weight.group_size // group, inputs // group
    scales = pad(weight.scales.float().repeat_interleave(times, dim=1), fill)
    _, exponents = torch.frexp(scales.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny))
    factors = torch.ldexp(torch.ones(len(scales)), exponents - _LARGEST_EXPONENT)
    has_zeros = weight.zeros is not None
    header = HEADER * (1 + has_zeros)
    sizes = (len(scales) // TILE, groups, header + group // TOGETHER * LINE)
    packed = aligned_empty(prod(sizes)).reshape(sizes)
    packed[..., :HEADER] = _bytes(_in_tiles((scales / factors[:, None]).half()))
    if weight.zeros is not None:
        zeros = pad(weight.zeros.repeat_interleave(times, dim=1).short(), fill)
        packed[..., HEADER:header] = _bytes(_in_tiles(zeros) * -_sizes().short())
    codes = pad(weight.codes(), fill).view(-1, BLOCKS, LANES, groups, group // TOGETHER, TOGETHER)
    lower, upper = codes.permute(1, 0, 3, 4, 2, 5)
    lines = lower | (upper << 4)
    packed[..., header:] = lines.reshape(*packed.shape[:2], -1).numpy()
    factors = (factors.view(-1, TILE) / _sizes()).flatten()
    return torch.from_numpy(packed.reshape(len(packed), -1)), factors[:outputs].contiguous()


def unpack(
    packed: torch.Tensor, factors: torch.Tensor, inputs: int, group: int, *, has_zeros: bool
) -> GroupWeight:
    """The opposite of `pack`, with scales in float32."""
    outputs, groups = len(factors), inputs // group
    parts = packed.view(len(packed), groups, -1)
    header = HEADER * (1 + has_zeros)
    lines = parts[..., header:].reshape(len(packed), groups, -1, LANES, TOGETHER)
    codes = torch.stack([lines & 15, lines >> 4]).permute(1, 0, 4, 2, 3, 5).reshape(-1, inputs)
    scales = _out_of_tiles(parts[..., :HEADER], torch.float16).float()[:outputs]
    scales *= (factors * _sizes().repeat(len(packed))[:outputs])[:, None]
    zeros = None
    if has_zeros:
        signed = _out_of_tiles(parts[..., HEADER:header], torch.int16)
        sizes = -_sizes().short().repeat(len(packed))[:, None]
        zeros = (signed // sizes)[:outputs].to(torch.uint8)
    return GroupWeight(4, pack_nibbles(codes[:outputs]), scales, zeros)


def _in_tiles(values: torch.Tensor) -> torch.Tensor:
    """[N, groups] -> [tiles, groups, 32]."""
    return values.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()


def _out_of_tiles(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of [tiles, groups, 32] -> [N, groups]."""
    values = stored.contiguous().view(dtype)
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def _bytes(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


def _sizes() -> torch.Tensor:
    """How large sums of a tile's outputs are, as multiples of what they should be [32]."""
    return torch.tensor([1.0, UPPER]).repeat_interleave(LANES)


@njit()
def round_groups(x, group, inputs, scales, sums):
    """x [rows, K] -> inputs int8 [rows, K], by groups: their scales, and the sums of integers."""
    for row in range(x.shape[0]):
        round_row(
            x[row:].ctypes.data, inputs[row:].ctypes.data, scales[row:].ctypes.data,
            sums[row:].ctypes.data, scales.shape[1], group // LANES,
        )  # fmt: skip


_one, _two, _three, _four, _five, _six, _seven, _eight = map(for_rows, range(1, MOST_ROWS + 1))


@njit()
def _add_up(tile, header, zeros, step, inputs, scales, sums, first, group, out):
    """Of the rows from `first` on as many as fit, out [8, TILE]; returns how many those are."""
    weights, begin = tile.ctypes.data, inputs[first:].ctypes.data
    width, groups, lines = inputs.shape[1], scales.shape[1], group // TOGETHER
    x_scales, x_sums = scales[first:].ctypes.data, sums[first:].ctypes.data
    count, to = min(inputs.shape[0] - first, MOST_ROWS), out.ctypes.data
    if count == 8:
        _eight(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    elif count == 7:
        _seven(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    elif count == 6:
        _six(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    elif count == 5:
        _five(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    elif count == 4:
        _four(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    elif count == 3:
        _three(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    elif count == 2:
        _two(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    else:
        _one(weights, header, zeros, step, begin, width, x_scales, x_sums, groups, lines, to)
    return count


@njit()
def product(
    counters, phase, packed, factors, bias, group, has_zeros, inputs, scales, sums, out, adds,
    waits,
):  # fmt: skip
    """out [rows, N] = inputs W^T + bias, or that in addition to what is there: one phase."""
    tiles, outputs = packed.shape[0], out.shape[1]
    header = HEADER * (2 if has_zeros else 1)
    step = header + group // TOGETHER * LINE if has_zeros else 0
    middle = np.empty(TILE, np.int16)  # zero points of all groups, where none are stored
    for n in range(TILE):
        middle[n] = -MIDDLE if n < LANES else -MIDDLE * UPPER
    found = np.empty((MOST_ROWS, TILE), np.float32)
    while True:
        begin, end = claim_tiles(counters, phase, tiles)
        if begin >= tiles:
            break
        for number in range(begin, end):
            zeros = packed[number, HEADER:].ctypes.data if has_zeros else middle.ctypes.data
            start = number * TILE
            width, first = min(TILE, outputs - start), 0
            while first < inputs.shape[0]:
                count = _add_up(
                    packed[number], header, zeros, step, inputs, scales, sums, first, group, found
                )
                for row in range(count):
                    to = out[first + row, start : start + width]
                    for n in range(width):
                        value = found[row, n] * factors[start + n] + bias[start + n]
                        to[n] = to[n] + value if adds else value
                first += count
        finish(counters, phase, end - begin)
    if waits:
        wait(counters, phase, tiles)


@njit()
def _gathered(x, order):
    """Inputs in the order in which weights lie."""
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[row, k] = x[row, order[k]]
    return out


@Product
def group_product(counters, phase, x, rows, matrix, out, mode):
    """`calls.apply` for 4 bits in groups: DETAIL has a group's size, and if zeros are stored."""
    own = carray(matrix, (FIELDS,))
    width, outputs, group = own[WIDTH], own[OUTPUTS], own[DETAIL] & 0xFFFFFFFF
    has_zeros = own[DETAIL] >= _HAS_ZEROS
    groups = width // group
    given = carray(x, (rows, width))
    if own[ORDER]:
        given = _gathered(given, carray(int32_at(own[ORDER]), (width,)))
    inputs = np.empty((rows, width), np.int8)
    scales, sums = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.int32)
    round_groups(given, group, inputs, scales, sums)
    tile = groups * (HEADER * (2 if has_zeros else 1) + group // TOGETHER * LINE)
    product(
        carray(counters, (phase + 1, COUNTERS)), phase,
        carray(bytes_at(own[WEIGHTS]), (-(-outputs // TILE), tile)),
        carray(floats_at(own[SCALES]), (outputs,)), carray(floats_at(own[BIAS]), (outputs,)),
        group, has_zeros, inputs, scales, sums, carray(out, (rows, outputs)), mode == ADDS,
        mode != WRITES_ON,
    )  # fmt: skip
