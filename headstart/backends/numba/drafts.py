"""A module of a head for some rows, and a whole chain of drafts, as one call each.

A chain reads what the trunk left behind, guesses the most likely token, reads that guess and its
own state, and so on. Every thread finds each guess by itself. For that every depth has logits
and a stream of its own: a late thread must not find those of a later depth.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.layers import FIRST, PHASES, RowLayout, apply, norm_rows, run_layers
from headstart.backends.numba.rows import norm

# norms [2, hidden], of what comes first and second; out_norm [hidden], or nothing where there is
# none; `swaps`: the state comes before the token.
Head = namedtuple("Head", "model norms fuse out_norm swaps recycles_normed")
# What a chain writes: streams [depths - 1, requests, hidden], logits [depths, requests, tokens].
Room = namedtuple("Room", "streams logits")

_STRETCH = 512  # values whose largest is found without looking where it is


def num_phases(layers: int) -> int:
    """Of one depth: fusing, the layers, the LM head."""
    return PHASES * layers + 2


@njit()
def _fuse(counters, phase, embedded, hidden, head, out):
    """What enters a head's block: both halves [rows, hidden] normed, side by side, one product."""
    rows, width = embedded.shape
    pair, eps = np.empty((rows, 2 * width), np.float32), head.model.layers.eps
    first, second = (hidden, embedded) if head.swaps else (embedded, hidden)
    for row in range(rows):
        norm(first[row], head.norms[0], eps, pair[row, :width])
        norm(second[row], head.norms[1], eps, pair[row, width:])
    apply(counters, phase, pair, head.fuse, FIRST, out, False)


@njit()
def run_head(counters, phase, embedded, hidden, stream, scratch, head, layout):
    """All rows through the module: the next phase, states for the LM head, recycled states."""
    _fuse(counters, phase, embedded, hidden, head, stream)
    phase = run_layers(counters, phase + 1, stream, scratch, head.model, layout)
    if not head.out_norm.shape[0]:
        return phase, stream, stream
    normed = norm_rows(stream, head.out_norm, head.model.layers.eps)
    return phase, normed, normed if head.recycles_normed else stream


@njit()
def run_chain(
    counters, embedded, hidden, stream, scratch, head, layout, last, later, active, embed, lm_head,
    tokens, room,
):  # fmt: skip
    """Drafts [depths, requests], those of each request as many as it asked for.

    The first pass has rows as `layout` say, of which `last` [requests] guess. In later ones each
    request has a row: those of the second depth as `later` says, with a row of slots [depths - 1,
    requests] for each; further ones one position on. `active` [depths]: how many requests, the
    first ones, go that deep.
    """
    depths, count = active.shape[0], last.shape[0]
    drafts = np.zeros((depths, count), np.int64)
    phase, normed, recycled = run_head(
        counters, FIRST, embedded, hidden, stream, scratch, head, layout
    )
    normed, recycled = normed[last], recycled[last]
    for depth in range(depths):
        rows = active[depth]
        if depth:
            own = RowLayout(
                later.positions[:rows] + (depth - 1), later.slots[depth - 1, :rows],
                later.kv_slots, later.runs, later.begins[:rows], later.ends[:rows] + (depth - 1),
                later.firsts[:rows], later.lasts[:rows],
            )  # fmt: skip
            phase, normed, recycled = run_head(
                counters, phase, embed[drafts[depth - 1, :rows]], recycled[:rows],
                room.streams[depth - 1, :rows], scratch, head, own,
            )  # fmt: skip
        logits = room.logits[depth, :rows]
        apply(counters, phase, normed, lm_head, FIRST, logits, False)
        phase += 1
        best = best_of_rows(logits)
        drafts[depth, :rows] = tokens[best] if tokens.shape[0] else best
    return drafts


@njit(fastmath={"nnan", "nsz"})  # the order of comparisons is free: no result changes
def _largest(row):
    found = row[0]
    for value in row:
        found = max(found, value)
    return found


@njit()
def best_of_rows(logits):
    """The column of the largest value in each row, the first of equal ones."""
    best = np.empty(logits.shape[0], np.int64)
    for row in range(logits.shape[0]):
        values = logits[row]
        start, found = 0, _largest(values[:_STRETCH])
        for begin in range(_STRETCH, values.shape[0], _STRETCH):
            largest = _largest(values[begin : begin + _STRETCH])
            if largest > found:
                start, found = begin, largest
        while values[start] != found and start < values.shape[0] - 1:
            start += 1
        best[row] = start
    return best
