"""Sums of products of small integers, 32 outputs at a time: what all int8 products consist of.

Weights are int8, inputs int16. Each pair of inputs is multiplied with a pair of weights of 16
outputs at once, which processors do in one instruction (vpdpwssd, vpmaddwd). Integers add up to
the same whatever the order, so a row's sums do not depend on the rows beside it. Loops in Python
do not compile to that instruction for several rows; hence LLVM's own language, in vectors
of fixed size that it cuts to what the processor has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.vectors import LANES, loop, prefetch

BLOCKS = 2  # vectors of LANES outputs in a tile
TILE = LANES * BLOCKS
MOST_ROWS = 8  # whose sums stay in registers
_AHEAD = 64  # pairs of inputs, whose weights take 64 bytes each, that are asked for ahead

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SUMS = ir.VectorType(_INT32, LANES)
_PAIRS = ir.VectorType(_INT32, 2 * LANES)
_FIRSTS = ir.Constant(_SUMS, list(range(0, 2 * LANES, 2)))
_SECONDS = ir.Constant(_SUMS, list(range(1, 2 * LANES, 2)))


def _for_rows(rows: int) -> Any:
    """The sums of a tile for so many rows."""

    @intrinsic
    def sums(
        typing: Any, weights: Any, inputs: Any, stride: Any, pairs: Any, out: Any
    ) -> tuple[Any, Any]:
        """Addresses of a tile, of the first row, of out [rows, TILE]; stride in inputs."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            weights, inputs, stride, pairs, out = arguments

            def add(pair: Any, totals: list[Any]) -> list[Any]:
                ahead = build.mul(build.add(pair, _INT64(_AHEAD)), _INT64(2 * TILE))
                prefetch(build, build.add(weights, ahead))
                tile = [_weights(build, weights, pair, block) for block in range(BLOCKS)]
                results: list[Any] = []
                for row in range(rows):
                    values = _inputs(build, inputs, build.mul(stride, _INT64(row)), pair)
                    for block in range(BLOCKS):
                        products = build.mul(tile[block], values)
                        firsts = build.shuffle_vector(products, products, _FIRSTS)
                        seconds = build.shuffle_vector(products, products, _SECONDS)
                        total = totals[len(results)]
                        results.append(build.add(total, build.add(firsts, seconds)))
                return results

            nothing = [ir.Constant(_SUMS, None)] * (rows * BLOCKS)
            results = loop(build, pairs, nothing, add)
            for number, result in enumerate(results):
                place = build.inttoptr(out, _SUMS.as_pointer())
                build.store(result, build.gep(place, [_INT64(number)])).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return sums


def _weights(build: Any, tile: Any, pair: Any, block: int) -> Any:
    """Of one pair of inputs, for 16 outputs."""
    at = build.add(tile, build.mul(pair, _INT64(2 * TILE)))
    place = build.add(at, _INT64(2 * LANES * block))
    stored = ir.VectorType(_INT8, 2 * LANES)
    loaded = build.load(build.inttoptr(place, stored.as_pointer()))
    loaded.align = 1
    return build.sext(loaded, _PAIRS)


def _inputs(build: Any, first: Any, offset: Any, pair: Any) -> Any:
    """One pair of inputs of a row, for all lanes; an input takes two bytes."""
    at = build.add(build.mul(offset, _INT64(2)), build.mul(pair, _INT64(4)))
    loaded = build.load(build.inttoptr(build.add(first, at), _INT32.as_pointer()))
    loaded.align = 2
    nothing = ir.Constant(_SUMS, ir.Undefined)
    one = build.insert_element(nothing, loaded, _INT32(0))
    broadcast = build.shuffle_vector(one, nothing, ir.Constant(_SUMS, None))
    return build.sext(build.bitcast(broadcast, ir.VectorType(_INT16, 2 * LANES)), _PAIRS)


_one, _two, _three, _four, _five, _six, _seven, _eight = map(_for_rows, range(1, MOST_ROWS + 1))


@njit()
def add_up(tile, inputs, first, out):
    """tile [pairs * 2 * TILE] int8, inputs [rows, 2 * pairs] int16 -> out [8, TILE] int32.

    Of the rows from `first` on as many as fit; returns how many those are.
    """
    weights, sums = tile.ctypes.data, out.ctypes.data
    rows, stride = inputs.shape
    begin, pairs, left = inputs[first:].ctypes.data, stride // 2, rows - first
    count = min(left, MOST_ROWS)
    if count == 8:
        _eight(weights, begin, stride, pairs, sums)
    elif count == 7:
        _seven(weights, begin, stride, pairs, sums)
    elif count == 6:
        _six(weights, begin, stride, pairs, sums)
    elif count == 5:
        _five(weights, begin, stride, pairs, sums)
    elif count == 4:
        _four(weights, begin, stride, pairs, sums)
    elif count == 3:
        _three(weights, begin, stride, pairs, sums)
    elif count == 2:
        _two(weights, begin, stride, pairs, sums)
    else:
        _one(weights, begin, stride, pairs, sums)
    return count
