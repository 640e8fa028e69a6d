"""Latent attention as a step: of a token one latent and one rotated key are kept, for all heads.

Queries are brought into the space of latents, and what they gather there is brought back, for a few
rows and for prompts alike: a row's bits must not depend on how many come along. An entry is the
key of all heads, and its latent their value.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from headstart.backends.numba import attention as grouped
from headstart.backends.numba.attention import look_around, memory_of, turn
from headstart.backends.numba.calls import (
    ADDS,
    FIELDS,
    WRITES,
    WRITES_ON,
    Step,
    floats_at,
    multiply,
)
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.mlp import outputs_of
from headstart.backends.numba.passes import (
    PASS,
    POSITIONS,
    ROWS,
    SCRATCH,
    SLOTS,
    counters_of,
    floats,
    norm_rows,
    normed_stream,
    number,
    stream_of,
    vector,
    words,
)
from headstart.backends.numba.rows import ONE, copy, norm
from headstart.backends.numba.sums import TILE
from headstart.backends.numba.thread_pool import claim, finish, wait
from headstart.backends.numba.vectors import LANES

# Of a step: first what `attention.py` has, of one key for all heads. DIM is the size of an entry,
# V_DIM that of a latent, QKV gives queries or their latent and the entry. Then: LIFT and LOWER are
# where the matrices of all heads begin that bring queries into the space of latents and values
# back; Q_UP may be 0, LATENT_EPS is bits of float32.
KV_NORM, Q_LATENT_NORM, LATENT_EPS, Q_UP, LIFT, LOWER, PLAIN_DIM, TURNED_DIM, HEAD_V_DIM = range(
    grouped.HEAD_GATE + 1, grouped.HEAD_GATE + 10
)
_FIXED_PHASES = 5


def num_phases(heads: int) -> int:
    return _FIXED_PHASES + 2 * heads


@njit()
def _part(rows, begin, width):
    """Some columns of all rows side by side, for one thread."""
    out = np.empty((rows.shape[0], width), np.float32)
    for row in range(rows.shape[0]):
        copy(rows[row, begin : begin + width], out[row])
    return out


@njit(inline="always")
def _turn_and_store(counters, phase, work, own, q, lifted, given, queries):
    """Queries in the space of latents with their rotated parts; entries go to their slots.

    An item is a row. given [rows, DIM]: latents and keys as they were projected.
    """
    rows, heads, rank, plain = work[ROWS], own[grouped.HEADS], own[grouped.V_DIM], own[PLAIN_DIM]
    turned, scale, eps = own[TURNED_DIM], number(own[grouped.SCALE]), number(own[LATENT_EPS])
    in_pairs = own[grouped.IN_PAIRS] != 0
    positions, slots = words(work[POSITIONS], rows), words(work[SLOTS], rows)
    keys, values = memory_of(own)
    weight, latent = vector(own[KV_NORM], rank), np.empty(rank, np.float32)
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        for row in range(begin, end):
            at = 4 * positions[row] * turned
            cos, sin = vector(own[grouped.COS] + at, turned), vector(own[grouped.SIN] + at, turned)
            for head in range(heads):
                to = queries[0, row * heads + head]
                for i in range(rank):
                    to[i] = lifted[head, row, i] * scale
                first = head * (plain + turned) + plain
                turn(q[row, first : first + turned], cos, sin, in_pairs, scale, to[rank:])
            group, lane = divmod(slots[row], LANES)
            norm(given[row, :rank], weight, eps, latent)
            copy(latent, keys[group, 0, :rank, lane])
            copy(latent, values[slots[row], 0, :rank])
            turn(given[row, rank:], cos, sin, in_pairs, ONE, keys[group, 0, rank:, lane])
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)


@njit()
def _by_head(counters, phase, rows, first, heads, width, begin, step, out):
    """Columns of each head through its own matrix: rows [rows, any] -> out [heads, rows, any]."""
    for head in range(heads):
        part = _part(rows, begin + head * step, width)
        multiply(counters, phase + head, part, first + 8 * FIELDS * head, out[head], WRITES_ON)
    tiles = -(-out.shape[2] // TILE)
    for head in range(heads):
        wait(counters, phase + head, tiles)


@njit(inline="always")
def _joined(found, rows):
    """[heads, rows, v] -> [rows, heads * v], for one thread."""
    heads, _, width = found.shape
    out = np.empty((rows, heads * width), np.float32)
    for row in range(rows):
        for head in range(heads):
            copy(found[head, row], out[row, head * width : (head + 1) * width])
    return out


@Step
def latent_attention(counters, phase, work, own):
    """Takes as many phases as `num_phases` says."""
    work, own = carray(work, (PASS,)), carray(own, (HEAD_V_DIM + 1,))
    rows, heads = work[ROWS], own[grouped.HEADS]
    phases = _FIXED_PHASES + 2 * heads
    counters = counters_of(counters, phase + phases)
    rank, entry, v_dim = own[grouped.V_DIM], own[grouped.DIM], own[HEAD_V_DIM]
    q_dim = own[PLAIN_DIM] + own[TURNED_DIM]
    wide = outputs_of(own[grouped.QKV])
    # Shared, one behind another: what is projected, queries, these in the space of latents, as
    # attention takes them, what they gathered, and what heads give.
    at = work[SCRATCH]
    both = floats(at, rows, wide)
    at += 4 * rows * wide
    q = floats(at, rows, heads * q_dim)
    at += 4 * rows * heads * q_dim
    lifted = carray(floats_at(at), (heads, rows, rank))
    at += 4 * heads * rows * rank
    queries = carray(floats_at(at), (1, rows * heads, entry))
    at += 4 * heads * rows * entry
    gathered = floats(at, rows, heads * rank)
    at += 4 * heads * rows * rank
    found = carray(floats_at(at), (heads, rows, v_dim))
    normed = normed_stream(work, own[grouped.NORM], own[grouped.EPS])
    multiply(counters, phase, normed, own[grouped.QKV], both, WRITES)
    if own[Q_UP]:
        part = _part(both, 0, wide - entry)
        weight = vector(own[Q_LATENT_NORM], wide - entry)
        latents = norm_rows(part, weight, number(own[LATENT_EPS]))
        multiply(counters, phase + 1, latents, own[Q_UP], q, WRITES)
    else:
        q = _part(both, 0, heads * q_dim)
    at_heads, plain = phase + _FIXED_PHASES, own[PLAIN_DIM]
    _by_head(counters, at_heads, q, own[LIFT], heads, plain, 0, q_dim, lifted)
    given = _part(both, wide - entry, entry)
    _turn_and_store(counters, phase + 2, work, own, q, lifted, given, queries)
    look_around(counters, phase + 3, work, own, queries, gathered)
    _by_head(counters, at_heads + heads, gathered, own[LOWER], heads, rank, 0, rank, found)
    multiply(counters, phase + 4, _joined(found, rows), own[grouped.OUT], stream_of(work), ADDS)
    return phases


def num_floats(rows: int, wide: int, heads: int, q_dim: int, rank: int, entry: int, v: int) -> int:
    """Of scratch."""
    return rows * (wide + heads * (q_dim + 2 * rank + entry + v))
