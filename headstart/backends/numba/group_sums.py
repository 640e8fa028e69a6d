"""Sums of products with weights of 4 bits in groups, 32 outputs at a time.

A tile is one stream of bytes: of each group of inputs first the scales of 32 outputs (float16),
then 64 bytes for every four inputs, with outputs 0 to 15 in the lower halves of bytes and 16 to 31
in the upper ones. Zero points, where there are any, lie in front of all that, 16 bytes per group in
the same order: beside the scales they would move lines across those of the cache. Inputs are int8
with one scale per row and part of a group. Four inputs are multiplied with those of 16 outputs in
one instruction where a processor has it (vpdpbusd). A part's sum is exact; floats are added part by
part in order, so a row gets the same bits whatever rows come along.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from headstart.backends.numba.rows import ROUNDING
from headstart.backends.numba.sums import BLOCKS, TILE
from headstart.backends.numba.vectors import LANES, VECTOR, broadcast, fma, load, loop, prefetch

TOGETHER = 4  # inputs in a lane
LINE = TOGETHER * TILE // 2  # bytes that hold the weights of so many inputs
HEADER = 2 * TILE  # bytes of a group's scales
POINTS = TILE // 2  # bytes of a group's zero points
UPPER = 16  # what the upper half of a byte counts for: sums of those outputs are that much larger
MIDDLE = 8  # the zero point where none is stored
_AHEAD = 64 * 9 * 14  # bytes, as far as weights are asked for before they are needed

_INT8, _INT32, _INT64, _FLOAT = (*(ir.IntType(n) for n in (8, 32, 64)), ir.FloatType())
_BYTES, _LANES = ir.VectorType(_INT8, 4 * LANES), ir.VectorType(_INT32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_PAIRS, _QUADS = ir.VectorType(_INT32, 2 * LANES), ir.VectorType(_INT32, 4 * LANES)
_EIGHTS = ir.VectorType(_INT8, LANES)
_LEVELS = 127
_ROUNDING = ir.Constant(VECTOR, [float(ROUNDING)] * LANES)
_SIZE_BITS = ir.Constant(_LANES, [0x7FFFFFFF] * LANES)
_HALF_BYTES = (0x0F, 0xF0)
_MASKS = [ir.Constant(_BYTES, [mask] * 4 * LANES) for mask in _HALF_BYTES]


def has_dot_product() -> bool:
    """Whether this processor multiplies and adds four bytes of 16 lanes in one instruction."""
    return bool(binding.get_host_cpu_features().get("avx512vnni", False))


class _FourAtOnce:
    """Sums of 16 outputs by one instruction for four inputs."""

    kind = _LANES

    def add(self, build: Any, total: Any, weights: Any, inputs: Any) -> Any:
        kind = ir.FunctionType(_LANES, [_LANES] * 3)
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = get_or_insert_function(build.module, kind, name)
        return build.call(function, [total, build.bitcast(weights, _LANES), inputs])

    def start(self, build: Any, offset: Any) -> Any:
        return offset

    def end(self, build: Any, total: Any) -> Any:
        return total


class _InPairs:
    """The same by products of pairs, which add up in two numbers per output."""

    kind = _PAIRS

    def add(self, build: Any, total: Any, weights: Any, inputs: Any) -> Any:
        wide = build.zext(weights, _QUADS)
        products = build.mul(wide, build.sext(build.bitcast(inputs, _BYTES), _QUADS))
        return build.add(total, _halved(build, products, 2 * LANES))

    def start(self, build: Any, offset: Any) -> Any:
        zero = ir.Constant(_LANES, None)
        order = [lane // 2 if lane % 2 == 0 else LANES for lane in range(2 * LANES)]
        return build.shuffle_vector(offset, zero, ir.Constant(_PAIRS, order))

    def end(self, build: Any, total: Any) -> Any:
        return _halved(build, total, LANES)


def _halved(build: Any, values: Any, count: int) -> Any:
    """Sums of neighbours: `count` of them."""
    kind = ir.VectorType(_INT32, count)
    parts = [
        build.shuffle_vector(values, values, ir.Constant(kind, list(range(first, 2 * count, 2))))
        for first in (0, 1)
    ]
    return build.add(*parts)


def for_rows(rows: int, *, is_plain: bool = False) -> Any:
    """The sums of a tile for so many rows; `is_plain`: without the one instruction."""
    way = _InPairs() if is_plain or not has_dot_product() else _FourAtOnce()

    @intrinsic
    def sums(
        typing: Any, tile: Any, zeros: Any, zeros_step: Any, inputs: Any, width: Any, scales: Any,
        totals: Any, groups: Any, parts: Any, lines: Any, out: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Addresses: of the first group's scales, of its zero points, of inputs [rows, width] int8,
        of their scales and sums [rows, groups * parts], of out [rows, TILE]. `zeros_step`: bytes
        from one group's zero points to the next's. `lines`: how many a part of a group has."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            tile, zeros, zeros_step, inputs, width, scales, totals, *others = arguments
            groups, parts, lines, out = others
            part_bytes, all_parts = build.mul(lines, _INT64(LINE)), build.mul(groups, parts)
            firsts = [build.add(inputs, build.mul(width, _INT64(row))) for row in range(rows)]

            def add_part(number: Any, values: list[Any]) -> list[Any]:
                start, begin, points, left, *sums = values
                prefetch(build, build.add(start, _INT64(_AHEAD)))
                place = build.mul(number, build.mul(lines, _INT64(TOGETHER)))

                def add_line(line: Any, exact: list[Any]) -> list[Any]:
                    at = build.add(begin, build.mul(line, _INT64(LINE)))
                    prefetch(build, build.add(at, _INT64(_AHEAD)))
                    codes = load(build, at, _BYTES)
                    weights = [build.and_(codes, mask) for mask in _MASKS]
                    offset = build.add(place, build.mul(line, _INT64(TOGETHER)))
                    results = []
                    for row in range(rows):
                        four = load(build, build.add(firsts[row], offset), _INT32)
                        values = _everywhere(build, four)
                        results += [
                            way.add(build, exact[BLOCKS * row + block], weights[block], values)
                            for block in range(BLOCKS)
                        ]
                    return results

                at = [
                    build.mul(build.add(number, build.mul(all_parts, _INT64(row))), _INT64(4))
                    for row in range(rows)
                ]
                middles = [_zeros(build, points, block) for block in range(BLOCKS)]
                starts = []
                for row in range(rows):
                    less = build.neg(load(build, build.add(totals, at[row]), _INT32))
                    own = _everywhere(build, less)
                    starts += [way.start(build, build.mul(own, middle)) for middle in middles]
                exact = loop(build, lines, starts, add_line)
                factors = [_scales(build, start, block) for block in range(BLOCKS)]
                results = []
                for row in range(rows):
                    own = broadcast(build, load(build, build.add(scales, at[row]), _FLOAT))
                    for block in range(BLOCKS):
                        total = BLOCKS * row + block
                        whole = build.sitofp(way.end(build, exact[total]), VECTOR)
                        factor = build.fmul(own, factors[block])
                        results.append(fma(build, whole, factor, sums[total]))
                end, is_last = (
                    build.add(begin, part_bytes),
                    build.icmp_signed("==", left, _INT64(1)),
                )
                following = (
                    (end, start), (build.add(end, _INT64(HEADER)), end),
                    (build.add(points, zeros_step), points),
                    (parts, build.sub(left, _INT64(1))),
                )  # fmt: skip
                return [*(build.select(is_last, *pair) for pair in following), *results]

            nothing = [ir.Constant(VECTOR, None)] * (rows * BLOCKS)
            begin = build.add(tile, _INT64(HEADER))
            _, _, _, _, *found = loop(
                build, all_parts, [tile, begin, zeros, parts, *nothing], add_part
            )
            for number, result in enumerate(found):
                place = build.add(out, _INT64(4 * LANES * number))
                build.store(result, build.inttoptr(place, VECTOR.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), generate

    return sums


@intrinsic
def round_row(
    typing: Any, x: Any, inputs: Any, scales: Any, totals: Any, groups: Any, vectors: Any
) -> tuple[Any, Any]:
    """Addresses of a row x float32, of its inputs int8, their scales and sums [groups]; a group has
    so many vectors. The largest of a group becomes 127, others the nearest integer."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        x, inputs, scales, totals, groups, vectors = arguments

        def round_group(group: Any, nothing: list[Any]) -> list[Any]:
            first = build.mul(group, build.mul(vectors, _INT64(LANES)))
            source = build.add(x, build.mul(first, _INT64(4)))

            def at(number: Any) -> Any:
                return load(build, build.add(source, build.mul(number, _INT64(4 * LANES))), VECTOR)

            def larger(number: Any, found: list[Any]) -> list[Any]:
                # Without their sign, bits have the order of the numbers.
                bits = build.and_(build.bitcast(at(number), _LANES), _SIZE_BITS)
                return [build.select(build.icmp_signed(">", bits, found[0]), bits, found[0])]

            [found] = loop(build, vectors, [ir.Constant(_LANES, None)], larger)
            largest = build.bitcast(_reduced(build, "smax", found), _FLOAT)
            is_blank = build.fcmp_ordered("==", largest, _FLOAT(0))
            factor = build.select(is_blank, _FLOAT(0), build.fdiv(_FLOAT(_LEVELS), largest))
            factors = broadcast(build, factor)

            def rounded(number: Any, totals: list[Any]) -> list[Any]:
                scaled = build.fadd(build.fmul(at(number), factors), _ROUNDING)
                whole = build.trunc(build.bitcast(scaled, _LANES), _EIGHTS)
                offset = build.add(first, build.mul(number, _INT64(LANES)))
                place = build.inttoptr(build.add(inputs, offset), _EIGHTS.as_pointer())
                build.store(whole, place).align = 1
                return [build.add(totals[0], build.sext(whole, _LANES))]

            [total] = loop(build, vectors, [ir.Constant(_LANES, None)], rounded)
            own = build.mul(group, _INT64(4))
            scale = build.fmul(largest, _FLOAT(1 / _LEVELS))
            for array, value in ((scales, scale), (totals, _reduced(build, "add", total))):
                place = build.inttoptr(build.add(array, own), value.type.as_pointer())
                build.store(value, place).align = 4
            return []

        loop(build, groups, [], round_group)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


def _reduced(build: Any, how: str, values: Any) -> Any:
    kind = ir.FunctionType(_INT32, [_LANES])
    name = f"llvm.vector.reduce.{how}.v{LANES}i32"
    return build.call(get_or_insert_function(build.module, kind, name), [values])


def _zeros(build: Any, points: Any, block: int) -> Any:
    """Zero points of 16 outputs, as large as sums are."""
    mask = ir.Constant(_EIGHTS, [_HALF_BYTES[block]] * LANES)
    return build.zext(build.and_(load(build, points, _EIGHTS), mask), _LANES)


def _scales(build: Any, start: Any, block: int) -> Any:
    at = build.add(start, _INT64(HEADER // BLOCKS * block))
    return build.fpext(load(build, at, _HALVES), VECTOR)


def _everywhere(build: Any, value: Any) -> Any:
    """A vector of the same integer."""
    nothing = ir.Constant(_LANES, ir.Undefined)
    one = build.insert_element(nothing, value, _INT32(0))
    return build.shuffle_vector(one, nothing, ir.Constant(_LANES, None))
