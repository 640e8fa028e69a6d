"""Attention as a step: q, k and v, their norms and rotation, the context, gates, the output.

Several heads share the keys of one. Queries and keys may be normed, rotated in part, in halves or
in pairs; rows may see a window only; a sink of each head may take part in soft-max; gates may scale
what heads give. Every layer has its own sizes and its own memory.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from headstart.backends.numba.calls import (
    ADDS,
    FIELDS,
    OUTPUTS,
    WRITES,
    WRITES_ON,
    Step,
    floats_at,
    multiply,
    words_at,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.context import attend
from headstart.backends.numba.passes import (
    BEGINS,
    ENDS,
    FIRSTS,
    GROUPS,
    KV_SLOTS,
    LASTS,
    PASS,
    POSITIONS,
    ROWS,
    ROWS_PER_ITEM,
    RUNS,
    SCRATCH,
    SEEN,
    SLOTS,
    counters_of,
    floats,
    normed_stream,
    number,
    stream_of,
    vector,
    words,
)
from headstart.backends.numba.rows import ONE, copy, gate, norm, rotate, rotate_pairs
from headstart.backends.numba.sums import TILE
from headstart.backends.numba.thread_pool import claim, finish, wait
from headstart.backends.numba.vectors import LANES

# Of a step; addresses may be 0 where there is none. EPS, SCALE (of scores) and V_SCALE are bits of
# float32. KEYS [groups, kv_heads, dim, 16], VALUES [slots, kv_heads, v_dim filled up to 16].
(
    CALL, NORM, EPS, QKV, OUT, HEADS, KV_HEADS, DIM, V_DIM, Q_NORM, K_NORM, COS, SIN, ROTATED,
    IN_PAIRS, SCALE, V_SCALE, KEYS, VALUES, NUM_SLOTS, WINDOW, SINKS, IS_GATED, HEAD_GATE,
) = range(24)  # fmt: skip
PHASES = 5
HEADS_PER_ITEM = 8  # that share keys; more would leave threads without work


@njit()
def memory_of(own):
    """Keys and values of all slots."""
    heads, slots = own[KV_HEADS], own[NUM_SLOTS]
    wide = -(-own[V_DIM] // LANES) * LANES
    keys = carray(floats_at(own[KEYS]), (-(-slots // LANES), heads, own[DIM], LANES))
    return keys, carray(floats_at(own[VALUES]), (slots, heads, wide))


@njit()
def scratch_of(work, own, qkv):
    """Shared: q, k and v [rows, qkv]; queries [kv_heads, rows * heads that share keys, dim]; what
    heads saw [rows, heads * v_dim]; gates of heads [rows, heads]."""
    rows, heads, kv_heads, dim = work[ROWS], own[HEADS], own[KV_HEADS], own[DIM]
    first = work[SCRATCH]
    second = first + 4 * rows * qkv
    third = second + 4 * rows * heads * dim
    fourth = third + 4 * rows * heads * own[V_DIM]
    queries = carray(floats_at(second), (kv_heads, rows * (heads // kv_heads), dim))
    return (
        floats(first, rows, qkv), queries, floats(third, rows, heads * own[V_DIM]),
        floats(fourth, rows, heads),
    )  # fmt: skip


@njit()
def turn(head, cos, sin, in_pairs, scale, out):
    if in_pairs:
        rotate_pairs(head, cos, sin, scale, out)
    else:
        rotate(head, cos, sin, scale, out)


@njit()
def _prepare(head, weight, eps, buffer):
    """A query or key as it is, or normed."""
    if weight == 0:
        return head
    norm(head, vector(weight, head.shape[0]), eps, buffer)
    return buffer


@njit(inline="always")
def _turn_and_store(counters, phase, work, own, qkv, queries):
    """Norm and rotate q and k; k and v go to their slots. An item is a row."""
    rows, heads, kv_heads = work[ROWS], own[HEADS], own[KV_HEADS]
    dim, v_dim, rotated = own[DIM], own[V_DIM], own[ROTATED]
    group, eps, in_pairs = heads // kv_heads, number(own[EPS]), own[IN_PAIRS] != 0
    scale, v_scale, step = number(own[SCALE]), number(own[V_SCALE]), dim * (1 + own[IS_GATED])
    positions, slots = words(work[POSITIONS], rows), words(work[SLOTS], rows)
    keys, values = memory_of(own)
    buffer = np.empty(dim, np.float32)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        for row in range(begin, end):
            at = 4 * positions[row] * rotated
            cos, sin = vector(own[COS] + at, rotated), vector(own[SIN] + at, rotated)
            slot = slots[row]
            for head in range(heads):
                q = _prepare(qkv[row, head * step : head * step + dim], own[Q_NORM], eps, buffer)
                to = queries[head // group, row * group + head % group]
                turn(q, cos, sin, in_pairs, scale, to)
            for head in range(kv_heads):
                first = heads * step + head * dim
                k = _prepare(qkv[row, first : first + dim], own[K_NORM], eps, buffer)
                turn(k, cos, sin, in_pairs, ONE, keys[slot // LANES, head, :, slot % LANES])
                first = heads * step + kv_heads * dim + head * v_dim
                for i in range(v_dim):
                    values[slot, head, i] = qkv[row, first + i] * v_scale
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)


@njit()
def _attend_rows(work, own, queries, keys, values, head, first, last, part, found, out):
    """Some heads of some rows of a request, which see the same slots up to the first row's."""
    group, (begin, end) = own[HEADS] // own[KV_HEADS], part
    number_of = end - begin
    begins, ends = words(work[BEGINS], work[ROWS]), words(work[ENDS], work[ROWS])
    kv_slots, runs = words(work[KV_SLOTS], work[SEEN]), words(work[RUNS], work[SEEN])
    start, together = begins[first], (last - first) * number_of
    if own[WINDOW]:
        start = max(start, ends[first] - own[WINDOW])
    asked = np.empty((together, own[DIM]), np.float32)
    counts, sinks = np.empty(together, np.int64), np.empty(together, np.float32)
    for place in range(together):
        row, head_of = first + place // number_of, begin + place % number_of
        counts[place] = ends[row] - start
        copy(queries[head, row * group + head_of], asked[place])
        sinks[place] = -np.inf
        if own[SINKS]:
            sinks[place] = vector(own[SINKS], own[HEADS])[head * group + head_of]
    seen = slice(start, ends[last - 1])
    attend(asked, keys, values, head, kv_slots[seen], runs[seen], counts, sinks, found[:together])
    v_dim = own[V_DIM]
    for place in range(together):
        row, head_of = first + place // number_of, begin + place % number_of
        at = (head * group + head_of) * v_dim
        copy(found[place, :v_dim], out[row, at : at + v_dim])


@njit()
def look_around(counters, phase, work, own, queries, out):
    """What every row sees [rows, heads * v_dim]: an item is some heads of a few rows that share
    keys."""
    keys, values = memory_of(own)
    kv_heads, group = own[KV_HEADS], own[HEADS] // own[KV_HEADS]
    parts, groups = -(-group // HEADS_PER_ITEM), work[GROUPS]
    firsts, lasts = words(work[FIRSTS], groups), words(work[LASTS], groups)
    most = ROWS_PER_ITEM * min(group, HEADS_PER_ITEM)
    found = np.empty((most, values.shape[2]), np.float32)
    items = groups * kv_heads * parts
    while True:
        begin, end = claim(counters, phase, items)
        if begin >= items:
            break
        for item in range(begin, end):
            together, rest = divmod(item, kv_heads * parts)
            head, number_of = divmod(rest, parts)
            first, last = firsts[together], lasts[together]
            begins = number_of * HEADS_PER_ITEM
            part = (begins, min(begins + HEADS_PER_ITEM, group))
            if own[WINDOW] == 0:
                _attend_rows(work, own, queries, keys, values, head, first, last, part, found, out)
                continue
            for row in range(first, last):  # each sees other slots
                _attend_rows(work, own, queries, keys, values, head, row, row + 1, part, found, out)
        finish(counters, phase, end - begin)
    wait(counters, phase, items)


@njit(inline="always")
def _gated(own, qkv, by_head, attended):
    """What heads saw under their gates, for one thread."""
    rows, v_dim, dim = attended.shape[0], own[V_DIM], own[DIM]
    out = np.empty_like(attended)
    for row in range(rows):
        for head in range(own[HEADS]):
            at = slice(head * v_dim, (head + 1) * v_dim)
            if own[HEAD_GATE]:
                for i in range(at.start, at.stop):
                    out[row, i] = attended[row, i] * gate(by_head[row, head])
            else:  # of each head first its q, then its gate
                beside = (2 * head + 1) * dim
                gates = qkv[row, beside : beside + v_dim]
                for i in range(v_dim):
                    out[row, at.start + i] = attended[row, at.start + i] * gate(gates[i])
    return out


@Step
def attention(counters, phase, work, own):
    """Grouped-query attention of all rows; takes PHASES."""
    counters = counters_of(counters, phase + PHASES)
    work, own = carray(work, (PASS,)), carray(own, (HEAD_GATE + 1,))
    width = carray(words_at(own[QKV]), (FIELDS,))[OUTPUTS]
    qkv, queries, attended, by_head = scratch_of(work, own, width)
    normed = normed_stream(work, own[NORM], own[EPS])
    if own[HEAD_GATE]:
        multiply(counters, phase + 1, normed, own[HEAD_GATE], by_head, WRITES_ON)
    multiply(counters, phase, normed, own[QKV], qkv, WRITES)
    if own[HEAD_GATE]:
        wait(counters, phase + 1, -(-own[HEADS] // TILE))
    _turn_and_store(counters, phase + 2, work, own, qkv, queries)
    look_around(counters, phase + 3, work, own, queries, attended)
    if own[IS_GATED] or own[HEAD_GATE]:
        attended = _gated(own, qkv, by_head, attended)
    multiply(counters, phase + 4, attended, own[OUT], stream_of(work), ADDS)
    return PHASES
