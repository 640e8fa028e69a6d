"""Queries that share keys over their context: scores, soft-max, the sum of values.

Keys lie with 16 slots side by side, [groups, kv_heads, dim, 16], so that 16 scores add up in the
lanes of a vector, dimension by dimension: no sum across lanes, and always the same order.
Values lie slot by slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import exp, largest
from headstart.backends.numba.vectors import LANES, VECTOR, broadcast, fma, load, loop

KEYS = 64  # of a context that are compared before soft-max goes on
QUERIES = 4  # that share what is loaded of keys and values
_GROUPS = KEYS // LANES
SCORES = KEYS + LANES  # of a query, with room for slots beyond those asked for

_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)


def _scores_of(queries: int, groups: int) -> Any:
    """Scores of so many queries with so many groups of keys."""

    @intrinsic
    def scores(
        typing: Any, first: Any, step: Any, keys: Any, stride: Any, dim: Any, out: Any
    ) -> Any:
        """Addresses; `step` bytes from a query to the next, `stride` from a group to the next."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            first, step, keys, stride, dim, out = arguments
            asked = [build.add(first, build.mul(step, _INT64(n))) for n in range(queries)]
            parts = [build.add(keys, build.mul(stride, _INT64(n))) for n in range(groups)]

            def add(number: Any, sums: list[Any]) -> list[Any]:
                at, offset = build.mul(number, _INT64(4)), build.mul(number, _INT64(4 * LANES))
                near = [load(build, build.add(part, offset), VECTOR) for part in parts]
                factors = [load(build, build.add(query, at), _FLOAT) for query in asked]
                spread = [broadcast(build, factor) for factor in factors]
                pairs = [(factor, part) for factor in spread for part in near]
                return [fma(build, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            nothing = [ir.Constant(VECTOR, None)] * (queries * groups)
            for number, result in enumerate(loop(build, dim, nothing, add)):
                query, group = divmod(number, groups)
                offset = 4 * (query * SCORES + group * LANES)
                place = build.inttoptr(build.add(out, _INT64(offset)), VECTOR.as_pointer())
                build.store(result, place).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return scores


def _blend_of(queries: int, vectors: int) -> Any:
    """Adds so many vectors of each value, times each query's share, to what is there."""

    @intrinsic
    def blend(
        typing: Any, shares: Any, values: Any, stride: Any, kv_slots: Any, count: Any,
        out: Any, step: Any,
    ) -> Any:  # fmt: skip
        """Addresses; `stride` bytes from one slot to the next, `step` from a query's out to
        the next one's, kv_slots int64."""

        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            shares, values, stride, kv_slots, count, out, step = arguments
            slots = []
            for query in range(queries):
                own = build.add(out, build.mul(step, _INT64(query)))
                target = build.inttoptr(own, VECTOR.as_pointer())
                slots += [build.gep(target, [_INT64(number)]) for number in range(vectors)]
            starts = [build.load(slot) for slot in slots]
            for start in starts:
                start.align = 4

            def add(number: Any, sums: list[Any]) -> list[Any]:
                slot = load(build, build.add(kv_slots, build.mul(number, _INT64(8))), _INT64)
                first = build.add(values, build.mul(slot, stride))
                parts = [
                    load(build, build.add(first, _INT64(4 * LANES * n)), VECTOR)
                    for n in range(vectors)
                ]
                at = build.add(shares, build.mul(number, _INT64(4)))
                own = [
                    broadcast(build, load(build, build.add(at, _INT64(4 * SCORES * n)), _FLOAT))
                    for n in range(queries)
                ]
                pairs = [(share, part) for share in own for part in parts]
                return [fma(build, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            for slot, result in zip(slots, loop(build, count, starts, add), strict=True):
                build.store(result, slot).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return blend


_score_1, _score_2, _score_3, _score_4 = (_scores_of(queries, 1) for queries in (1, 2, 3, 4))
_scores_1, _scores_2, _scores_3, _scores_4 = (
    _scores_of(queries, _GROUPS) for queries in (1, 2, 3, 4)
)
_blend_1, _blend_2, _blend_3, _blend_4 = (_blend_of(queries, 1) for queries in (1, 2, 3, 4))
_blends_1, _blends_2, _blends_3, _blends_4 = (_blend_of(queries, 4) for queries in (1, 2, 3, 4))


@njit()
def _score_group(queries, address, stride, out):
    """Up to four queries with one group of keys."""
    begin, step, dim, target = queries.ctypes.data, queries.strides[0], queries.shape[1], out
    if queries.shape[0] == 4:
        _score_4(begin, step, address, stride, dim, target)
    elif queries.shape[0] == 3:
        _score_3(begin, step, address, stride, dim, target)
    elif queries.shape[0] == 2:
        _score_2(begin, step, address, stride, dim, target)
    else:
        _score_1(begin, step, address, stride, dim, target)


@njit()
def _score_groups(queries, address, stride, out):
    """The same with KEYS / LANES groups."""
    begin, step, dim, target = queries.ctypes.data, queries.strides[0], queries.shape[1], out
    if queries.shape[0] == 4:
        _scores_4(begin, step, address, stride, dim, target)
    elif queries.shape[0] == 3:
        _scores_3(begin, step, address, stride, dim, target)
    elif queries.shape[0] == 2:
        _scores_2(begin, step, address, stride, dim, target)
    else:
        _scores_1(begin, step, address, stride, dim, target)


@njit()
def _score(queries, keys, kv_head, kv_slots, runs, out):
    """Scores of up to four queries with the keys in up to KEYS slots.

    Whole groups at once where slots follow. out [4, SCORES]: a group's other slots may leave
    their scores behind the last.
    """
    count, number, stride = kv_slots.shape[0], 0, keys.strides[0]
    while number < count:
        group, lane = divmod(kv_slots[number], LANES)
        address, target = keys[group, kv_head].ctypes.data, out[0, number:].ctypes.data
        follow = min(runs[number], count - number)
        if lane == 0 and follow == KEYS:
            _score_groups(queries, address, stride, target)
            number += KEYS
        elif lane == 0 and follow >= min(LANES, count - number):
            _score_group(queries, address, stride, target)
            number += LANES
        else:
            _score_group(queries, address, stride, out[0, KEYS:].ctypes.data)
            used = min(follow, LANES - lane)
            for query in range(queries.shape[0]):
                for j in range(used):
                    out[query, number + j] = out[query, KEYS + lane + j]
            number += used


@njit(fastmath={"reassoc"})  # the order follows from how many there are
def _sum(scores):
    total = np.float32(0)
    for score in scores:
        total += score
    return total


@njit()
def attend(queries, keys, values, kv_head, kv_slots, runs, counts, sinks, out):
    """queries [n, dim], scaled -> out [n, size of values, which is a multiple of 16]: each sees the
    first `counts` [n] of the slots.

    `runs`: from each place on, how many follow one another. They decide the way, not the bits,
    and so do the queries beside one. Soft-max runs along: what was found so far shrinks when a
    higher score comes. A query sees no fewer kv_slots than the one before it. sinks [n]: a further
    score with nothing behind it; -inf where there is none.
    """
    for first in range(0, queries.shape[0], QUERIES):
        own = slice(first, min(first + QUERIES, queries.shape[0]))
        _attend(
            queries[own], keys, values, kv_head, kv_slots, runs, counts[own], sinks[own], out[own]
        )


@njit()
def _attend(queries, keys, values, kv_head, kv_slots, runs, counts, sinks, out):
    number = queries.shape[0]
    highest, total = np.empty(QUERIES, np.float32), np.zeros(QUERIES, np.float32)
    scores = np.empty((QUERIES, SCORES), np.float32)
    for query in range(number):
        highest[query] = -np.inf
        for d in range(out.shape[1]):
            out[query, d] = 0
    longest = counts[number - 1]
    for start in range(0, longest, KEYS):
        end = min(start + KEYS, longest)
        seen = kv_slots[start:end]
        _score(queries, keys, kv_head, seen, runs[start:end], scores)
        for query in range(number):
            count = min(counts[query] - start, KEYS)
            if count <= 0:
                continue
            own = scores[query]
            found = max(largest(own[:count]), highest[query])
            shrunk = exp(highest[query] - found) if start else np.float32(0)
            highest[query] = found
            for j in range(count):
                own[j] = exp(own[j] - found)
            total[query] = total[query] * shrunk + _sum(own[:count])
            for d in range(out.shape[1]):
                out[query, d] *= shrunk
        common = max(0, min(counts[0] - start, KEYS))
        if common:
            _add_values(scores, values, kv_head, seen[:common], out)
        for query in range(number):  # what the first does not see
            rest = min(counts[query] - start, KEYS)
            if rest > common:
                part = slice(query, query + 1)
                _add_values(scores[part, common:], values, kv_head, seen[common:rest], out[part])
    for query in range(number):
        found = max(sinks[query], highest[query])
        shrunk = exp(highest[query] - found)
        share = total[query] * shrunk + exp(sinks[query] - found)
        for d in range(out.shape[1]):
            out[query, d] = out[query, d] * shrunk / share


@njit()
def _add_values(shares, values, kv_head, kv_slots, out):
    dim, done, count = out.shape[1], 0, kv_slots.shape[0]
    stride, step, number = values.strides[0], out.strides[0], out.shape[0]
    share, where = shares.ctypes.data, kv_slots.ctypes.data
    while done < dim:
        address, target = values[0, kv_head, done:].ctypes.data, out[0, done:].ctypes.data
        if dim - done >= 4 * LANES:
            if number == 4:
                _blends_4(share, address, stride, where, count, target, step)
            elif number == 3:
                _blends_3(share, address, stride, where, count, target, step)
            elif number == 2:
                _blends_2(share, address, stride, where, count, target, step)
            else:
                _blends_1(share, address, stride, where, count, target, step)
            done += 4 * LANES
        else:
            if number == 4:
                _blend_4(share, address, stride, where, count, target, step)
            elif number == 3:
                _blend_3(share, address, stride, where, count, target, step)
            elif number == 2:
                _blend_2(share, address, stride, where, count, target, step)
            else:
                _blend_1(share, address, stride, where, count, target, step)
            done += LANES
