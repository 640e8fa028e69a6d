"""A mixture of experts as a step: routing, the chosen experts, shared ones, the weighted sum.

Every expert that was chosen is read once, however many rows chose it. Experts follow one another
without waiting: a thread that finds nothing left of one begins the next. A row's sum runs over its
experts in the order in which they were chosen.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from headstart.backends.numba.calls import FIELDS, WRITES, WRITES_ON, Step, multiply
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.mlp import opened, outputs_of
from headstart.backends.numba.passes import (
    HIDDEN,
    PASS,
    ROWS,
    SCRATCH,
    counters_of,
    floats,
    normed_stream,
    number,
    stream_of,
    vector,
)
from headstart.backends.numba.routing import (
    choose,
    num_stored,
    num_stored_compiled,
    routes_at,
    sort,
)
from headstart.backends.numba.rows import copy, gate
from headstart.backends.numba.sums import TILE
from headstart.backends.numba.thread_pool import claim, finish, wait

# Of a step. ROUTER is a matrix, CORRECTION [experts] or 0; FIRST and SECOND are where the matrices
# of all experts begin, one behind another; those of the shared part, and its gate, may be 0.
# EPS, LEAST_SUM, SCALE and limits are bits of float32.
(
    CALL, NORM, EPS, ROUTER, CORRECTION, NUM_EXPERTS, TOP_K, IS_SIGMOID, NUM_GROUPS, TOP_GROUPS,
    RENORMALISES, LEAST_SUM, SCALE, FIRST, SECOND, LIMIT, LIMIT_BEFORE, SHARED_FIRST,
    SHARED_SECOND, SHARED_GATE, SHARED_LIMIT, SHARED_LIMIT_BEFORE,
) = range(22)  # fmt: skip
_OTHER_PHASES = 8  # beside experts and storage: router, choice, sorting, shared ones, the sum


@njit()
def _tiles(matrix):
    return -(-outputs_of(matrix) // TILE)


@njit()
def _expert(first, number_of):
    """Where an expert's matrix lies."""
    return first + 8 * FIELDS * number_of


@njit(inline="always")
def _read(counters, phase, x, own, routes, inner):
    """Gate and up of all experts: x [rows, hidden] -> inner [pairs, 2 * width]."""
    for at in range(routes.count[0]):
        begin, end = routes.begins[at], routes.begins[at + 1]
        rows = np.empty((end - begin, x.shape[1]), np.float32)
        for pair in range(begin, end):
            copy(x[routes.rows[pair]], rows[pair - begin])
        matrix = _expert(own[FIRST], routes.active[at])
        multiply(counters, phase + at, rows, matrix, inner[begin:end], WRITES_ON)
    for at in range(routes.count[0]):
        wait(counters, phase + at, _tiles(own[FIRST]))


@njit(inline="always")
def _write(counters, phase, inner, own, routes, said):
    """Down of all experts: inner [pairs, 2 * width] -> said [pairs, hidden]."""
    for at in range(routes.count[0]):
        begin, end = routes.begins[at], routes.begins[at + 1]
        rows = opened(inner[begin:end], own[LIMIT], own[LIMIT_BEFORE])
        matrix = _expert(own[SECOND], routes.active[at])
        multiply(counters, phase + at, rows, matrix, said[begin:end], WRITES_ON)
    for at in range(routes.count[0]):
        wait(counters, phase + at, _tiles(own[SECOND]))


@njit(inline="always")
def _add_up(counters, phase, own, routes, said, shared, gates, stream):
    """What a row's experts said, weighed, and the shared part, go to the stream; items are rows."""
    rows, top_k = routes.chosen.shape
    total = np.empty(stream.shape[1], np.float32)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        for row in range(begin, end):
            for i in range(total.shape[0]):
                total[i] = 0
            for number_of in range(top_k):
                weight = number(routes.weights[row, number_of])
                part = said[routes.places[row, number_of]]
                for i in range(total.shape[0]):
                    total[i] += part[i] * weight
            if own[SHARED_FIRST]:
                weight = gate(gates[row, 0]) if own[SHARED_GATE] else np.float32(1)
                for i in range(total.shape[0]):
                    total[i] += shared[row, i] * weight
            for i in range(total.shape[0]):
                stream[row, i] += total[i]
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)


@Step
def experts(counters, phase, work, own):
    """Takes as many phases as `num_phases` says."""
    work, own = carray(work, (PASS,)), carray(own, (SHARED_LIMIT_BEFORE + 1,))
    rows, hidden, top_k, count = work[ROWS], work[HIDDEN], own[TOP_K], own[NUM_EXPERTS]
    pairs = rows * top_k
    most = min(pairs, count)
    stored = num_stored_compiled(rows, top_k, count)
    phases = _OTHER_PHASES + 2 * most + stored
    counters = counters_of(counters, phase + phases)
    routes = routes_at(counters, phase + phases - stored, rows, top_k, count)
    width = outputs_of(own[FIRST])
    shared_width = outputs_of(own[SHARED_FIRST]) if own[SHARED_FIRST] else 0
    inner = floats(work[SCRATCH], pairs, width)
    said = floats(work[SCRATCH] + 4 * pairs * width, pairs, hidden)
    logits_at = work[SCRATCH] + 4 * pairs * (width + hidden)
    logits = floats(logits_at, rows, count)
    inner_at = logits_at + 4 * rows * count
    shared_inner = floats(inner_at, rows, shared_width)
    shared = floats(inner_at + 4 * rows * shared_width, rows, hidden)
    gates = floats(inner_at + 4 * rows * (shared_width + hidden), rows, 1)
    normed = normed_stream(work, own[NORM], own[EPS])
    if own[SHARED_FIRST]:
        multiply(counters, phase + 1, normed, own[SHARED_FIRST], shared_inner, WRITES_ON)
    if own[SHARED_GATE]:
        multiply(counters, phase + 2, normed, own[SHARED_GATE], gates, WRITES_ON)
    multiply(counters, phase, normed, own[ROUTER], logits, WRITES)
    correction = vector(own[CORRECTION], count if own[CORRECTION] else 0)
    settings = (
        own[IS_SIGMOID] != 0, own[NUM_GROUPS], own[TOP_GROUPS], own[RENORMALISES] != 0,
        own[LEAST_SUM], own[SCALE], count,
    )  # fmt: skip
    choose(counters, phase + 3, logits, correction, settings, routes)
    sort(counters, phase + 4, routes, count)
    at = phase + _OTHER_PHASES
    _read(counters, at, normed, own, routes, inner)
    if own[SHARED_FIRST]:
        wait(counters, phase + 1, _tiles(own[SHARED_FIRST]))
        rest = opened(shared_inner, own[SHARED_LIMIT], own[SHARED_LIMIT_BEFORE])
        multiply(counters, phase + 5, rest, own[SHARED_SECOND], shared, WRITES_ON)
    _write(counters, at + most, inner, own, routes, said)
    if own[SHARED_FIRST]:
        wait(counters, phase + 5, _tiles(own[SHARED_SECOND]))
    if own[SHARED_GATE]:
        wait(counters, phase + 2, 1)
    _add_up(counters, phase + 6, own, routes, said, shared, gates, stream_of(work))
    return phases


def num_phases(rows: int, top_k: int, num_experts: int) -> int:
    most = min(rows * top_k, num_experts)
    return _OTHER_PHASES + 2 * most + num_stored(rows, top_k, num_experts)


def num_floats(
    rows: int, top_k: int, num_experts: int, width: int, shared_width: int, hidden: int
) -> int:
    """Of scratch; widths are those of gate and up together."""
    return rows * (top_k * (width + hidden) + num_experts + shared_width + hidden + 1)
