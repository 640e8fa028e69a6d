"""A gated MLP as a step: gate and up in one product, silu, down."""

from __future__ import annotations

import numpy as np
from numba import carray

from headstart.backends.numba.calls import (
    ADDS,
    FIELDS,
    OUTPUTS,
    WRITES,
    Step,
    multiply,
    words_at,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.passes import (
    PASS,
    ROWS,
    SCRATCH,
    counters_of,
    floats,
    normed_stream,
    number,
    stream_of,
)
from headstart.backends.numba.rows import limited_swiglu, swiglu

# Of a step. EPS and LIMIT (0 where nothing is cut off) are bits of float32.
CALL, NORM, EPS, GATE_UP, DOWN, LIMIT, LIMIT_BEFORE = range(7)
PHASES = 2


@njit()
def outputs_of(matrix):
    return carray(words_at(matrix), (FIELDS,))[OUTPUTS]


@njit()
def opened(gate_up, limit, is_before):
    """What lies between the two products, for one thread."""
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
    most = number(limit)
    for row in range(gate_up.shape[0]):
        if most > 0:
            limited_swiglu(gate_up[row], most, is_before != 0, out[row])
        else:
            swiglu(gate_up[row], out[row])
    return out


@Step
def mlp(counters, phase, work, own):
    """Takes PHASES."""
    counters = counters_of(counters, phase + PHASES)
    work, own = carray(work, (PASS,)), carray(own, (LIMIT_BEFORE + 1,))
    gate_up = floats(work[SCRATCH], work[ROWS], outputs_of(own[GATE_UP]))
    normed = normed_stream(work, own[NORM], own[EPS])
    multiply(counters, phase, normed, own[GATE_UP], gate_up, WRITES)
    inner = opened(gate_up, own[LIMIT], own[LIMIT_BEFORE])
    multiply(counters, phase + 1, inner, own[DOWN], stream_of(work), ADDS)
    return PHASES
