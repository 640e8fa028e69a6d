"""What all steps of a pass share: its rows, where they go and what they see, as one table.

A pass is a row of int64: sizes, and where its arrays lie. Every thread makes the table for itself;
the arrays are shared. `scratch` is one piece of memory that each step cuts up as it needs it.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import carray

from headstart.backends.numba.calls import floats_at, run_step, words_at
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import float_of, norm
from headstart.backends.numba.thread_pool import COUNTERS

# Of each row [rows]: its position, its own slot, and which of `kv_slots` it sees.
# `runs`: from each place on, how many follow one another. Up to ROWS_PER_ITEM rows of a request
# attend together: `firsts` and `lasts` (the row behind) of each such group.
# `spans` [requests, SPAN]: of recurrent layers, as `delta.py` has them; `keeps` [any, 2].
RowLayout = namedtuple(
    "RowLayout", "positions slots kv_slots runs begins ends firsts lasts spans keeps"
)
ROWS_PER_ITEM = 2  # more would leave threads without work

# Of a pass.
(
    ROWS, HIDDEN, STREAM, SCRATCH, POSITIONS, SLOTS, KV_SLOTS, SEEN, RUNS, BEGINS, ENDS, FIRSTS,
    LASTS, GROUPS, SPANS, REQUESTS, KEEPS, NUM_KEEPS,
) = range(18)  # fmt: skip
PASS = 18  # int64 of a pass
# Of a span: its first row, the row behind its last, the slot of the state before it or -1, and
# which of `keeps` (rows done, slot) are its own.
SPAN = 5
SPAN_START, SPAN_STOP, SPAN_SOURCE, SPAN_KEEPS, SPAN_KEPT = range(SPAN)


@njit()
def describe(stream, scratch, layout):
    """The table of a pass, for as long as its arrays live."""
    work = np.empty(PASS, np.int64)
    work[ROWS], work[HIDDEN] = stream.shape
    work[STREAM], work[SCRATCH] = stream.ctypes.data, scratch.ctypes.data
    work[POSITIONS], work[SLOTS] = layout.positions.ctypes.data, layout.slots.ctypes.data
    work[KV_SLOTS], work[SEEN] = layout.kv_slots.ctypes.data, layout.kv_slots.shape[0]
    work[RUNS] = layout.runs.ctypes.data
    work[BEGINS], work[ENDS] = layout.begins.ctypes.data, layout.ends.ctypes.data
    work[FIRSTS], work[LASTS] = layout.firsts.ctypes.data, layout.lasts.ctypes.data
    work[GROUPS] = layout.firsts.shape[0]
    work[SPANS], work[REQUESTS] = layout.spans.ctypes.data, layout.spans.shape[0]
    work[KEEPS], work[NUM_KEEPS] = layout.keeps.ctypes.data, layout.keeps.shape[0]
    return work


@njit()
def run_layers(counters, phase, stream, scratch, layers, layout):
    """The residual stream [rows, hidden] through all steps, in place, by a thread pool.

    `phase` is the first; returns the one behind the last. A step reads the stream and adds to it.
    Norms, rounding and gates are computed by every thread for itself: that takes less time than
    waiting for another. No phase writes what it reads.
    """
    work = describe(stream, scratch, layout)
    for step in range(layers.shape[0]):
        phase = run_step(counters, phase, work, layers[step])
    return phase


@njit()
def words(address, count):
    return carray(words_at(address), (count,))


@njit()
def table(address, rows, width):
    return carray(words_at(address), (rows, width))


@njit()
def floats(address, rows, width):
    return carray(floats_at(address), (rows, width))


@njit()
def vector(address, count):
    return carray(floats_at(address), (count,))


@njit()
def number(field):
    """The float32 whose bits a field has."""
    return float_of(np.int32(field))


@njit()
def counters_of(address, phases):
    return carray(address, (phases, COUNTERS))


@njit()
def norm_rows(x, weight, eps):
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        norm(x[row], weight, eps, out[row])
    return out


@njit()
def normed_stream(work, weight, eps):
    """The norm of all rows of the stream, for one thread."""
    stream = floats(work[STREAM], work[ROWS], work[HIDDEN])
    return norm_rows(stream, vector(weight, work[HIDDEN]), number(eps))


@njit()
def stream_of(work):
    return floats(work[STREAM], work[ROWS], work[HIDDEN])
