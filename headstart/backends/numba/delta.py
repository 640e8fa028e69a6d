"""The gated delta net as a step: projections, a short convolution, the delta rule, a gated norm.

`models/delta_rule.py` has the rule. Rows of a request are taken one after another, whatever their
number, so a row's bits depend on the rows before it alone. Columns of a memory do not depend on
each other: some of them at a time stay in the first cache while all rows go over them. After rows
that `keeps` names the memory is written to a slot, so that a request can go on from any of them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from headstart.backends.numba.calls import ADDS, WRITES, Step, floats_at, multiply
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.delta_rule import COLUMNS, step
from headstart.backends.numba.mlp import outputs_of
from headstart.backends.numba.passes import (
    KEEPS,
    NUM_KEEPS,
    PASS,
    REQUESTS,
    ROWS,
    SCRATCH,
    SPAN,
    SPAN_KEEPS,
    SPAN_KEPT,
    SPAN_SOURCE,
    SPAN_START,
    SPAN_STOP,
    SPANS,
    counters_of,
    floats,
    normed_stream,
    number,
    stream_of,
    table,
    vector,
)
from headstart.backends.numba.rows import ONE, copy, dot, exp, fill, gate, norm, silu
from headstart.backends.numba.thread_pool import claim, finish, wait

# Of a step. TAPS [kernel, channels]: the convolution, the oldest row first; CONV [slots, kernel -
# 1, channels] and MEMORY [slots, v_heads, k_dim, v_dim] are the states. EPS is bits of float32.
(
    CALL, NORM, EPS, INPUTS, OUT, K_HEADS, V_HEADS, K_DIM, V_DIM, KERNEL, TAPS, A_LOG, DT_BIAS,
    OUT_NORM, CONV, MEMORY, NUM_SLOTS, IS_SIGMOID,
) = range(18)  # fmt: skip
PHASES = 4
_TINY = np.float32(1e-6)  # as in models/linear_attention.py


@njit()
def _channels(own):
    return 2 * own[K_HEADS] * own[K_DIM] + own[V_HEADS] * own[V_DIM]


@njit()
def _span_of(spans, row):
    """The request that a row belongs to."""
    for number_of in range(spans.shape[0]):
        if row < spans[number_of, SPAN_STOP]:
            return number_of
    return spans.shape[0] - 1


@njit()
def _convolve(mixed, before, has_before, taps, row, start, channels, out):
    """Some channels of a row over its last rows, under silu; `before` are those of the state."""
    kernel = taps.shape[0]
    fill(out, np.float32(0))
    for tap in range(kernel):
        at = row - (kernel - 1 - tap)
        if at >= start:
            for i in range(out.shape[0]):
                out[i] += mixed[at, channels + i] * taps[tap, channels + i]
        elif has_before:
            for i in range(out.shape[0]):
                out[i] += before[at - start + kernel - 1, channels + i] * taps[tap, channels + i]
    for i in range(out.shape[0]):
        out[i] = silu(out[i])


@njit()
def _scale_to_unit(x, scale):
    factor = scale / np.float32(math.sqrt(dot(x, x) + _TINY))
    for i in range(x.shape[0]):
        x[i] *= factor


@njit(inline="always")
def _convolve_rows(counters, phase, own, spans, mixed, conv, convolved):
    """q, k and v of all rows: an item is a key head of a row with the values that it serves."""
    rows, k_heads, k_dim = mixed.shape[0], own[K_HEADS], own[K_DIM]
    group, keys = own[V_HEADS] // k_heads * own[V_DIM], k_heads * k_dim
    taps = floats(own[TAPS], own[KERNEL], _channels(own))
    items, scale = rows * k_heads, np.float32(1 / math.sqrt(k_dim))
    while True:
        begin, end = claim(counters, phase, items)
        if begin >= items:
            break
        for item in range(begin, end):
            row, head = divmod(item, k_heads)
            span = spans[_span_of(spans, row)]
            start, source = span[SPAN_START], span[SPAN_SOURCE]
            before = conv[max(source, 0)]
            for part in range(3):
                first = part * keys + head * (k_dim if part < 2 else group)
                out = convolved[row, first : first + (k_dim if part < 2 else group)]
                _convolve(mixed, before, source >= 0, taps, row, start, first, out)
                if part < 2:
                    _scale_to_unit(out, scale if part == 0 else ONE)
        finish(counters, phase, end - begin)
    wait(counters, phase, items)


@njit(inline="always")
def _keep_inputs(span, keeps, mixed, conv):
    """The rows that a convolution still has to see, after each row that is kept."""
    start, back = span[SPAN_START], conv.shape[1]
    width = conv.shape[2]
    first, count = span[SPAN_KEEPS], span[SPAN_KEPT]
    old = np.zeros((back, width), np.float32)  # a slot that is kept may be the source
    if span[SPAN_SOURCE] >= 0:
        for i in range(back):
            copy(conv[span[SPAN_SOURCE], i], old[i])
    for place in range(first, first + count):
        done, slot = keeps[place, 0], keeps[place, 1]
        for i in range(back):
            at = start + done - back + i
            row = mixed[at, :width] if at >= start else old[at - start + back]
            copy(row, conv[slot, i])


@njit(inline="always")
def _recur(own, span, keeps, head, mixed, convolved, memories, out):
    """All rows of a request over one head's memory; out [rows, values]: normed, under its gate."""
    k_dim, v_dim, channels = own[K_DIM], own[V_DIM], _channels(own)
    start, stop, source = span[SPAN_START], span[SPAN_STOP], span[SPAN_SOURCE]
    k_head, keys = head // (own[V_HEADS] // own[K_HEADS]), own[K_HEADS] * k_dim
    values = own[V_HEADS] * v_dim
    fading = exp(vector(own[A_LOG], own[V_HEADS])[head])
    bias = vector(own[DT_BIAS], own[V_HEADS])[head]
    result = np.empty((stop - start, v_dim), np.float32)
    given, found = np.zeros(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    for first in range(0, v_dim, COLUMNS):
        columns = min(COLUMNS, v_dim - first)
        memory = np.zeros((k_dim, COLUMNS), np.float32)
        if source >= 0:
            for k in range(k_dim):
                copy(memories[source, head, k, first : first + columns], memory[k])
        place, last = span[SPAN_KEEPS], span[SPAN_KEEPS] + span[SPAN_KEPT]
        for row in range(start, stop):
            a = mixed[row, channels + values + own[V_HEADS] + head] + bias
            # soft-plus, without overflow
            rate = max(a, np.float32(0)) + np.float32(math.log1p(math.exp(-abs(a))))
            strength = gate(mixed[row, channels + values + head])
            at = 2 * keys + head * v_dim + first
            copy(convolved[row, at : at + columns], given)
            step(
                memory, convolved[row, keys + k_head * k_dim : keys + (k_head + 1) * k_dim],
                convolved[row, k_head * k_dim : (k_head + 1) * k_dim], given,
                exp(-fading * rate), strength, found,
            )  # fmt: skip
            copy(found[:columns], result[row - start, first : first + columns])
            while place < last and keeps[place, 0] == row - start + 1:
                slot = keeps[place, 1]
                for k in range(k_dim):
                    to = memories[slot, head, k, first : first + columns]
                    copy(memory[k, :columns], to)
                place += 1
    weight, eps = vector(own[OUT_NORM], v_dim), number(own[EPS])
    for row in range(start, stop):
        to = out[row, head * v_dim : (head + 1) * v_dim]
        gates = mixed[row, channels + head * v_dim : channels + (head + 1) * v_dim]
        norm(result[row - start], weight, eps, to)
        for i in range(v_dim):
            to[i] *= gate(gates[i]) if own[IS_SIGMOID] else silu(gates[i])


@njit(inline="always")
def _recur_all(counters, phase, own, spans, keeps, mixed, convolved, conv, memories, out):
    """Items are heads of requests, and for each request its rows for convolutions."""
    heads = own[V_HEADS]
    items = spans.shape[0] * (heads + 1)
    while True:
        begin, end = claim(counters, phase, items)
        if begin >= items:
            break
        for item in range(begin, end):
            number_of, head = divmod(item, heads + 1)
            if head == heads:
                _keep_inputs(spans[number_of], keeps, mixed, conv)
            else:
                _recur(own, spans[number_of], keeps, head, mixed, convolved, memories, out)
        finish(counters, phase, end - begin)
    wait(counters, phase, items)


@Step
def delta_net(counters, phase, work, own):
    """Takes PHASES."""
    counters = counters_of(counters, phase + PHASES)
    work, own = carray(work, (PASS,)), carray(own, (IS_SIGMOID + 1,))
    rows, width, channels = work[ROWS], outputs_of(own[INPUTS]), _channels(own)
    mixed = floats(work[SCRATCH], rows, width)
    convolved = floats(work[SCRATCH] + 4 * rows * width, rows, channels)
    values = own[V_HEADS] * own[V_DIM]
    out = floats(work[SCRATCH] + 4 * rows * (width + channels), rows, values)
    spans = table(work[SPANS], work[REQUESTS], SPAN)
    keeps = table(work[KEEPS], work[NUM_KEEPS], 2)
    conv = carray(floats_at(own[CONV]), (own[NUM_SLOTS], own[KERNEL] - 1, channels))
    memories = carray(
        floats_at(own[MEMORY]), (own[NUM_SLOTS], own[V_HEADS], own[K_DIM], own[V_DIM])
    )
    normed = normed_stream(work, own[NORM], own[EPS])
    multiply(counters, phase, normed, own[INPUTS], mixed, WRITES)
    _convolve_rows(counters, phase + 1, own, spans, mixed, conv, convolved)
    _recur_all(counters, phase + 2, own, spans, keeps, mixed, convolved, conv, memories, out)
    multiply(counters, phase + 3, out, own[OUT], stream_of(work), ADDS)
    return PHASES
