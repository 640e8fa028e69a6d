"""Sums of products with weights of 8 bits, 32 outputs at a time: floats (e4m3), and integers.

A tile is one stream of bytes. In front lie the scales of its groups of inputs (floats: float32, one
for all outputs of a group) or their zero points (integers: 32 bytes per group, where there are
any). Then comes group after group: of integers first the scales of 32 outputs, in float16 or
float32, then 128 bytes for every four inputs, with those of one output side by side. Weights become
float32 in registers, which is exact. Four products are added up and then added to their group's
sum, groups are scaled and added up in order: a row gets the same bits whatever rows come along.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headstart.backends.numba.sums import BLOCKS, MOST_ROWS, TILE
from headstart.backends.numba.vectors import (
    LANES,
    VECTOR,
    broadcast,
    choose,
    fma,
    load,
    loop,
    prefetch,
)

TOGETHER = 4  # inputs in a lane
LINE = TOGETHER * TILE  # bytes that hold the weights of so many inputs
HALVES, FLOATS = 2 * TILE, 4 * TILE  # bytes of a group's scales
POINTS = TILE  # bytes of a group's zero points
SCALE = 4  # bytes of the scale of a group of floats
MIDDLE = 128  # the zero point where none is stored
_AHEAD = 8192  # bytes, as far as weights are asked for before they are needed
_LINE_OF_CACHE = 64

_INT8, _INT32, _INT64, _FLOAT = (*(ir.IntType(n) for n in (8, 32, 64)), ir.FloatType())
_WORDS, _EIGHTS = ir.VectorType(_INT32, LANES), ir.VectorType(_INT8, LANES)
_HALF_LANES = ir.VectorType(ir.HalfType(), LANES)
# An e4m3 number whose bits are moved to those of a float32 is 2^120 times too small; multiplying
# by that is exact for all of them, also for the smallest, whose exponent is 0.
_MOVED = ir.Constant(_WORDS, [0x87F00000 - (1 << 32)] * LANES)
_SIZE = ir.Constant(VECTOR, [2.0**120] * LANES)
_BYTE = ir.Constant(_WORDS, [0xFF] * LANES)


def _shift(count: int) -> Any:
    return ir.Constant(_WORDS, [count] * LANES)


def _as_floats(build: Any, words: Any, place: int, _: Any) -> Any:
    """The e4m3 numbers in one byte of 16 words."""
    moved = build.ashr(build.shl(words, _shift(24 - 8 * place)), _shift(4))
    return build.fmul(build.bitcast(build.and_(moved, _MOVED), VECTOR), _SIZE)


def _as_integers(build: Any, words: Any, place: int, zeros: Any) -> Any:
    """Unsigned codes in one byte of 16 words, less their zero points."""
    codes = build.and_(build.lshr(words, _shift(8 * place)), _BYTE)
    return build.sitofp(build.sub(codes, zeros), VECTOR)


def _no_zeros(build: Any, front: Any, block: int) -> Any:
    return None


def _zeros(build: Any, front: Any, block: int) -> Any:
    at = build.add(front, _INT64(LANES * block))
    return build.zext(load(build, at, _EIGHTS), _WORDS)


def _scale_of_all(build: Any, front: Any, start: Any, is_wide: Any, block: int) -> Any:
    return broadcast(build, load(build, front, _FLOAT))


def _scales(build: Any, front: Any, start: Any, is_wide: Any, block: int) -> Any:
    """Of 16 outputs. Both are read, since a choice takes less time than a branch."""
    halves = load(build, build.add(start, _INT64(HALVES // BLOCKS * block)), _HALF_LANES)
    floats = load(build, build.add(start, _INT64(FLOATS // BLOCKS * block)), VECTOR)
    return build.select(is_wide, floats, build.fpext(halves, VECTOR))


_FORMATS = ((_as_floats, _no_zeros, _scale_of_all), (_as_integers, _zeros, _scales))
OF_FLOATS, OF_INTEGERS = (number * MOST_ROWS for number in range(len(_FORMATS)))


@intrinsic
def sums(
    typing: Any, case: Any, tile: Any, front: Any, front_step: Any, header: Any, inputs: Any,
    stride: Any, groups: Any, lines: Any, last_lines: Any, out: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """`case`: OF_FLOATS or OF_INTEGERS, and how many rows less one. Addresses: of the first group,
    of what is in front of it, of inputs [rows, K] float32, of out [rows, TILE]. Bytes: from one
    group's front to the next's, of a group's scales among its weights, of a row. `lines`: how many
    a group has, and the last one."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        case, *others = arguments
        cases = [
            lambda rows=rows, form=form: _add_up(build, rows, form, *others)
            for form in _FORMATS for rows in range(1, MOST_ROWS + 1)
        ]  # fmt: skip
        choose(build, case, cases)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11), generate


def _add_up(
    build: Any, rows: int, form: Any, tile: Any, front: Any, front_step: Any, header: Any,
    inputs: Any, stride: Any, groups: Any, lines: Any, last_lines: Any, out: Any,
) -> None:  # fmt: skip
    as_numbers, zeros_of, scales_of = form
    is_wide = build.icmp_signed("==", header, _INT64(FLOATS))
    firsts = [build.add(inputs, build.mul(stride, _INT64(row))) for row in range(rows)]
    last = build.sub(groups, _INT64(1))

    def add_group(group: Any, values: list[Any]) -> list[Any]:
        start, *totals = values
        begin = build.add(start, header)
        own = build.add(front, build.mul(group, front_step))
        zeros = [zeros_of(build, own, block) for block in range(BLOCKS)]
        place = build.mul(group, build.mul(lines, _INT64(4 * TOGETHER)))
        count = build.select(build.icmp_signed("==", group, last), last_lines, lines)

        def add_line(line: Any, found: list[Any]) -> list[Any]:
            at = build.add(begin, build.mul(line, _INT64(LINE)))
            for part in range(0, LINE, _LINE_OF_CACHE):
                prefetch(build, build.add(at, _INT64(_AHEAD + part)))
            words = [
                load(build, build.add(at, _INT64(4 * LANES * block)), _WORDS)
                for block in range(BLOCKS)
            ]
            four: list[Any] = [ir.Constant(VECTOR, None)] * (rows * BLOCKS)
            offset = build.add(place, build.mul(line, _INT64(4 * TOGETHER)))
            for number in range(TOGETHER):
                weights = [
                    as_numbers(build, words[block], number, zeros[block]) for block in range(BLOCKS)
                ]
                for row, first in enumerate(firsts):
                    source = build.add(first, build.add(offset, _INT64(4 * number)))
                    value = broadcast(build, load(build, source, _FLOAT))
                    for block in range(BLOCKS):
                        at_row = BLOCKS * row + block
                        if number:
                            four[at_row] = fma(build, value, weights[block], four[at_row])
                        else:
                            four[at_row] = build.fmul(value, weights[block])
            return [build.fadd(total, part) for total, part in zip(found, four, strict=True)]

        found = loop(build, count, [ir.Constant(VECTOR, None)] * (rows * BLOCKS), add_line)
        scales = [scales_of(build, own, start, is_wide, block) for block in range(BLOCKS)]
        results = [
            fma(build, part, scales[number % BLOCKS], total)
            for number, (part, total) in enumerate(zip(found, totals, strict=True))
        ]
        return [build.add(begin, build.mul(count, _INT64(LINE))), *results]

    nothing = [ir.Constant(VECTOR, None)] * (rows * BLOCKS)
    for number, result in enumerate(loop(build, groups, [tile, *nothing], add_group)[1:]):
        place = build.add(out, _INT64(4 * LANES * number))
        build.store(result, build.inttoptr(place, VECTOR.as_pointer())).align = 4
