"""The heads of one row that share keys over their context: scores, soft-max, the sum of values.

Keys lie with 16 slots side by side, [groups, kv_heads, dim, 16], so that 16 scores add up in the
lanes of a vector, dimension by dimension: no sum across lanes, and always the same order.
Values lie slot by slot. Loops that keep their sums in registers are written in LLVM's language;
compilers leave those sums in memory, which takes several times longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from headstart.cpu.compiler import njit
from headstart.cpu.rows import exp

LANES = 16
KEYS = 64  # of a context that are compared before soft-max goes on
_GROUPS = KEYS // LANES

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _load(build: Any, address: Any, kind: Any) -> Any:
    loaded = build.load(build.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def _everywhere(build: Any, value: Any) -> Any:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    one = build.insert_element(nothing, value, _INT32(0))
    return build.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_INT32, LANES), None))


def _fma(build: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = get_or_insert_function(build.module, kind, f"llvm.fma.v{LANES}f32")
    return build.call(function, [a, b, c])


def _loop(build: Any, times: Any, starts: list[Any], step: Any) -> list[Any]:
    """`step(number, values)` gives the next values; those after the last time."""
    before = build.block
    loop, after = build.append_basic_block("loop"), build.append_basic_block("after")
    build.branch(loop)
    build.position_at_end(loop)
    number = build.phi(_INT64)
    number.add_incoming(_INT64(0), before)
    values = [build.phi(_VECTOR) for _ in starts]
    following = step(number, values)
    for value, start, then in zip(values, starts, following, strict=True):
        value.add_incoming(start, before)
        value.add_incoming(then, loop)
    count = build.add(number, _INT64(1))
    number.add_incoming(count, loop)
    build.cbranch(build.icmp_signed("<", count, times), loop, after)
    build.position_at_end(after)
    return list(following)


def _scores_of(groups: int) -> Any:
    """Scores of so many groups of keys with a query."""

    @intrinsic
    def scores(typing: Any, query: Any, keys: Any, stride: Any, dim: Any, out: Any) -> Any:
        """Addresses; `stride` bytes from the keys of one group to those of the next."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            query, keys, stride, dim, out = arguments
            firsts = [build.add(keys, build.mul(stride, _INT64(n))) for n in range(groups)]

            def step(number: Any, sums: list[Any]) -> list[Any]:
                at = build.add(query, build.mul(number, _INT64(4)))
                factor = _everywhere(build, _load(build, at, _FLOAT))
                offset = build.mul(number, _INT64(4 * LANES))
                parts = [_load(build, build.add(first, offset), _VECTOR) for first in firsts]
                pairs = zip(parts, sums, strict=True)
                return [_fma(build, factor, part, total) for part, total in pairs]

            results = _loop(build, dim, [ir.Constant(_VECTOR, None)] * groups, step)
            place = build.inttoptr(out, _VECTOR.as_pointer())
            for number, result in enumerate(results):
                build.store(result, build.gep(place, [_INT64(number)])).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return scores


def _blend_of(vectors: int) -> Any:
    """Adds so many vectors of each value, times its share, to what is there."""

    @intrinsic
    def blend(
        typing: Any, shares: Any, values: Any, stride: Any, places: Any, count: Any, out: Any
    ) -> Any:
        """Addresses; `stride` bytes from one slot to the next, places int64."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            shares, values, stride, places, count, out = arguments
            target = build.inttoptr(out, _VECTOR.as_pointer())
            slots = [build.gep(target, [_INT64(number)]) for number in range(vectors)]
            starts = [build.load(slot) for slot in slots]
            for start in starts:
                start.align = 4

            def step(number: Any, sums: list[Any]) -> list[Any]:
                at = build.add(shares, build.mul(number, _INT64(4)))
                share = _everywhere(build, _load(build, at, _FLOAT))
                slot = _load(build, build.add(places, build.mul(number, _INT64(8))), _INT64)
                first = build.add(values, build.mul(slot, stride))
                parts = [
                    _load(build, build.add(first, _INT64(4 * LANES * n)), _VECTOR)
                    for n in range(vectors)
                ]
                pairs = zip(parts, sums, strict=True)
                return [_fma(build, share, part, total) for part, total in pairs]

            for slot, result in zip(slots, _loop(build, count, starts, step), strict=True):
                build.store(result, slot).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return blend


_score_one, _score_all = _scores_of(1), _scores_of(_GROUPS)
_blend_one, _blend_four = _blend_of(1), _blend_of(4)


@njit()
def _score(query, keys, kv_head, places, runs, out):
    """Scores with the keys at up to KEYS places, whole groups at once where places follow.

    out [KEYS + LANES]: a group's other slots may leave their scores behind the last.
    """
    count, dim, number = places.shape[0], query.shape[0], 0
    begin, stride = query.ctypes.data, keys.strides[0]
    while number < count:
        group, lane = divmod(places[number], LANES)
        address, target = keys[group, kv_head].ctypes.data, out[number:].ctypes.data
        follow = min(runs[number], count - number)
        if lane == 0 and follow == KEYS:
            _score_all(begin, address, stride, dim, target)
            number += KEYS
        elif lane == 0 and follow >= min(LANES, count - number):
            _score_one(begin, address, stride, dim, target)
            number += LANES
        else:
            spare = out[KEYS:]
            _score_one(begin, address, stride, dim, spare.ctypes.data)
            used = min(follow, LANES - lane)
            out[number : number + used] = spare[lane : lane + used]
            number += used


@njit(fastmath={"nnan", "nsz"})  # the order of comparisons is free: no result changes
def _highest(scores, found):
    for score in scores:
        found = max(found, score)
    return found


@njit(fastmath={"reassoc"})  # the order follows from how many there are
def _sum(scores):
    total = np.float32(0)
    for score in scores:
        total += score
    return total


@njit()
def attend(queries, keys, values, kv_head, places, runs, out):
    """queries [heads, dim], scaled, over the places of their row -> out [heads, dim].

    `runs`: from each place on, how many follow one another. They decide the way, not the bits.
    Soft-max runs along: what was found so far shrinks when a higher score comes.
    """
    heads = queries.shape[0]
    highest, total = np.full(heads, -np.inf, np.float32), np.zeros(heads, np.float32)
    scores = np.empty(KEYS + LANES, np.float32)
    out[:] = 0
    for start in range(0, places.shape[0], KEYS):
        seen, follow = places[start : start + KEYS], runs[start : start + KEYS]
        count = seen.shape[0]
        for head in range(heads):  # while these keys and values are near
            _score(queries[head], keys, kv_head, seen, follow, scores)
            found = _highest(scores[:count], highest[head])
            shrunk = exp(highest[head] - found) if start else np.float32(0)
            highest[head] = found
            for j in range(count):
                scores[j] = exp(scores[j] - found)
            total[head] = total[head] * shrunk + _sum(scores[:count])
            for d in range(out.shape[1]):
                out[head, d] *= shrunk
            _add_values(scores, values, kv_head, seen, out[head])
    for head in range(heads):
        for d in range(out.shape[1]):
            out[head, d] /= total[head]


@njit()
def _add_values(shares, values, kv_head, places, out):
    dim, done = out.shape[0], 0
    stride, count = values.strides[0], places.shape[0]
    while done < dim:
        address, target = values[0, kv_head, done:].ctypes.data, out[done:].ctypes.data
        if dim - done >= 4 * LANES:
            _blend_four(shares.ctypes.data, address, stride, places.ctypes.data, count, target)
            done += 4 * LANES
        else:
            _blend_one(shares.ctypes.data, address, stride, places.ctypes.data, count, target)
            done += LANES
