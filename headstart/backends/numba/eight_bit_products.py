"""Products of a few rows with 8-bit floats, and with 8-bit integers in groups, as they are stored.

`models/quantized.py` holds the same weights. They become float32 in registers and are multiplied in
float32; what a scale belongs to is scaled when it is added up. A row gets the same bits alone and
among others, whatever the number of threads.
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
from headstart.backends.numba.eight_bit_sums import (
    FLOATS,
    MIDDLE,
    OF_FLOATS,
    OF_INTEGERS,
    POINTS,
    SCALE,
    TOGETHER,
    sums,
)
from headstart.backends.numba.rows import gathered
from headstart.backends.numba.sums import BLOCKS, MOST_ROWS, TILE
from headstart.backends.numba.thread_pool import COUNTERS, claim_tiles, finish, wait
from headstart.backends.numba.tiles import filled_up, half_scales, in_tiles
from headstart.backends.numba.vectors import LANES
from headstart.checkpoint.quantized.weights import (
    FP8_BLOCK,
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
)

# In DETAIL above a group's size: bytes of its scales, of what lies in front of a tile's groups.
_HEADER_AT, _FRONT_AT = 24, 32
_NO_NUMBER = 0x7F  # the e4m3 code of NaN, without its sign
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def takes(weight: QuantizedWeight) -> bool:
    """Whether the kernels can read them; they would read NaN among floats as a number."""
    if isinstance(weight, GroupWeight):
        return weight.bits == 8 and weight.group_size % TOGETHER == 0
    is_number = weight.weight.view(torch.uint8) & _NO_NUMBER != _NO_NUMBER
    return weight.shape[1] % TOGETHER == 0 and bool(is_number.all())


def pack(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tiles [tiles, bytes] in the order in which a product reads, a factor per output, DETAIL."""
    return _pack_integers(weight) if isinstance(weight, GroupWeight) else _pack_floats(weight)


def _pack_floats(weight: Fp8Weight) -> tuple[torch.Tensor, torch.Tensor, int]:
    outputs, inputs = weight.shape
    tiles = -(-outputs // TILE)
    group, factors, scales = inputs, weight.scales.clone(), torch.ones(tiles, 1)
    if weight.form == "fp8-block":  # a tile never lies in two blocks
        group, factors = FP8_BLOCK, torch.ones(outputs)
        scales = weight.scales.repeat_interleave(FP8_BLOCK // TILE, dim=0)[:tiles].contiguous()
    stored = SCALE * scales.shape[1]
    front = filled_up(stored)
    packed = _blank(tiles, front + TILE * inputs)
    packed[:, :stored] = scales.view(torch.uint8)
    packed[:, front:] = _lines(weight.weight.view(torch.uint8)).flatten(1)
    return packed, factors, group | front << _FRONT_AT


def _pack_integers(weight: GroupWeight) -> tuple[torch.Tensor, torch.Tensor, int]:
    outputs, group, groups = weight.shape[0], weight.group_size, weight.scales.shape[1]
    fill = (0, 0, 0, -outputs % TILE)
    scales = pad(weight.scales.float(), fill)
    values, factors = half_scales(scales)
    if not torch.equal(values.float() * factors[:, None], scales):  # they have more than 16 bits
        values, factors = scales, torch.ones(len(scales))
    front = 0 if weight.zeros is None else filled_up(POINTS * groups)
    header, tiles = TILE * values.itemsize, len(scales) // TILE
    packed = _blank(tiles, front + groups * (header + TILE * group))
    if weight.zeros is not None:
        packed[:, : POINTS * groups] = in_tiles(pad(weight.zeros, fill)).flatten(1)
    parts = packed[:, front:].unflatten(1, (groups, -1))
    parts[..., :header] = in_tiles(values).view(torch.uint8)
    parts[..., header:] = _lines(weight.weight).view(tiles, groups, -1)
    return packed, factors[:outputs].contiguous(), group | header << _HEADER_AT | front << _FRONT_AT


def unpack_rows(packed: torch.Tensor, ids: torch.Tensor, inputs: int, detail: int) -> Parts:
    """Of some outputs: codes uint8 [n, K], scales [n, groups] without their factor, zero points."""
    header, front = detail >> _HEADER_AT & 0xFF, detail >> _FRONT_AT
    groups = -(-inputs // group_of(detail))
    tile, place, every = ids // TILE, ids % TILE, torch.arange(len(ids))
    # Between the groups of floats lies nothing.
    parts = packed[:, front:].unflatten(1, (groups if header else 1, -1))
    lines = parts[..., header:].unflatten(2, (-1, BLOCKS, LANES, TOGETHER))
    codes = lines.permute(0, 3, 4, 1, 2, 5)[tile, place // LANES, place % LANES].flatten(1)
    fronts = packed[:, :front][tile]
    if not header:
        return codes, fronts[:, : SCALE * groups].contiguous().view(torch.float32), None
    stored = parts[..., :header][tile].view(torch.float32 if header == FLOATS else torch.float16)
    zeros = None
    if front:
        zeros = fronts[:, : POINTS * groups].unflatten(1, (groups, TILE))[every, :, place]
    return codes, stored[every, :, place].float(), zeros


def group_of(detail: int) -> int:
    """How many inputs share a scale."""
    return detail & (1 << _HEADER_AT) - 1


def is_of_floats(detail: int) -> bool:
    return not detail >> _HEADER_AT & 0xFF


def _blank(tiles: int, size: int) -> torch.Tensor:
    return torch.from_numpy(aligned_empty(tiles * size)).view(tiles, size).zero_()


def _lines(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] -> [tiles, K / 4, 128]."""
    whole = pad(codes, (0, 0, 0, -len(codes) % TILE))
    parts = whole.view(-1, BLOCKS, LANES, whole.shape[1] // TOGETHER, TOGETHER)
    return parts.permute(0, 3, 1, 2, 4).flatten(2)


@njit()
def product(
    counters, phase, packed, group, header, front, factors, bias, inputs, out, adds, waits,
):  # fmt: skip
    """out [rows, N] = inputs W^T + bias, or that in addition to what is there: one phase."""
    tiles, outputs = packed.shape[0], out.shape[1]
    rows, width = inputs.shape
    groups = -(-width // group)
    lines, last = group // TOGETHER, (width - (groups - 1) * group) // TOGETHER
    middles = np.full(POINTS, MIDDLE, np.uint8)  # where no zero points are stored
    case, step = OF_FLOATS, SCALE
    if header > 0:
        case, step = OF_INTEGERS, POINTS if front > 0 else 0
    found = np.empty((MOST_ROWS, TILE), np.float32)
    while True:
        begin, end = claim_tiles(counters, phase, tiles)
        if begin >= tiles:
            break
        for number in range(begin, end):
            before = packed[number].ctypes.data if front > 0 else middles.ctypes.data
            start = number * TILE
            count, first = min(TILE, outputs - start), 0
            while first < rows:
                together = min(rows - first, MOST_ROWS)
                sums(
                    case + together - 1, packed[number, front:].ctypes.data, before, step, header,
                    inputs[first:].ctypes.data, 4 * width, groups, lines, last, found.ctypes.data,
                )  # fmt: skip
                for row in range(together):
                    to = out[first + row, start : start + count]
                    for n in range(count):
                        value = found[row, n] * factors[start + n] + bias[start + n]
                        to[n] = to[n] + value if adds else value
                first += together
        finish(counters, phase, end - begin)
    if waits:
        wait(counters, phase, tiles)


@Product
def eight_bit_product(counters, phase, x, rows, matrix, out, mode):
    """`calls.apply` for 8 bits: DETAIL as the packing functions make it."""
    own = carray(matrix, (FIELDS,))
    width, outputs, detail = own[WIDTH], own[OUTPUTS], own[DETAIL]
    group, front = detail & ((1 << _HEADER_AT) - 1), detail >> _FRONT_AT
    header = (detail >> _HEADER_AT) & 0xFF
    given = carray(x, (rows, width))
    if own[ORDER]:
        given = gathered(given, carray(int32_at(own[ORDER]), (width,)))
    tile = front + TILE * width + -(-width // group) * header
    product(
        carray(counters, (phase + 1, COUNTERS)), phase,
        carray(bytes_at(own[WEIGHTS]), (-(-outputs // TILE), tile)), group, header, front,
        carray(floats_at(own[SCALES]), (outputs,)), carray(floats_at(own[BIAS]), (outputs,)),
        given, carray(out, (rows, outputs)), mode == ADDS, mode != WRITES_ON,
    )  # fmt: skip
