"""A trunk's pass, a module of a head, and whole chains of drafts, as one call each.

One call runs all layers, whatever they consist of (`calls.py`). A chain of drafts reads what the
trunk left behind, chooses a token, reads that token and its own state, and so on. Every depth has
logits, choices and a stream of its own: a late thread must not find those of a later depth.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.calls import FIELDS, apply
from headstart.backends.numba.choice import OwnColumns, choose_drafts, draft_logits
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.noise import argmax
from headstart.backends.numba.passes import RowLayout, norm_rows, run_layers
from headstart.backends.numba.rows import copy, norm
from headstart.backends.numba.sampling import FIRST


@njit()
def runs(kv_slots):
    """From each place on, how many follow one another: [4, 5, 9] -> [2, 1, 1]."""
    result, count = np.empty(kv_slots.shape[0], np.int64), 0
    for at in range(kv_slots.shape[0] - 1, -1, -1):
        is_last = at + 1 == kv_slots.shape[0] or kv_slots[at + 1] != kv_slots[at] + 1
        count = 1 if is_last else count + 1
        result[at] = count
    return result


@njit()
def run_trunk(counters, stream, scratch, layers, eps, layout, final_norm, lm_head, wanted, logits):
    """All layers; the final norm of all rows, and logits of those that are wanted."""
    phase = run_layers(counters, FIRST, stream, scratch, layers, layout)
    normed = norm_rows(stream, final_norm, eps)
    if wanted.shape[0]:
        apply(counters, phase, normed[wanted], lm_head, logits)
    return normed


# norms [2, hidden], of what comes first and second; out_norm [hidden], or nothing where there is
# none; `swaps`: the state comes before the token.
# layers [steps, STEP], as `held.py` makes them; eps of all norms.
Head = namedtuple("Head", "layers eps norms fuse out_norm swaps recycles_normed")
# What a chain writes: streams [depths - 1, requests, hidden], logits [depths, requests, columns],
# chosen tokens [depths, requests], what was drawn from [depths, requests, tokens or 0].
ChainBuffers = namedtuple("ChainBuffers", "streams logits chosen probs")


HEAD_PHASES = 3  # of one depth, beside the block: fusing, the LM head, the choice


def no_own_columns(requests: int, depths: int) -> OwnColumns:
    """Of requests that draft from a list, or from all tokens, alone."""
    none = np.zeros((requests, 0), np.int32)
    return OwnColumns(
        np.zeros(requests, np.int64), np.zeros((requests, FIELDS), np.int64), none, none,
        np.zeros((requests, 0), np.int64), np.empty((depths, requests, 0), np.float32),
    )  # fmt: skip


@njit(inline="always")
def _fuse(counters, phase, embedded, hidden, head, out):
    """What enters a head's block: both halves [rows, hidden] normed, side by side, one product."""
    rows, width = embedded.shape
    pair, eps = np.empty((rows, 2 * width), np.float32), head.eps
    first, second = (hidden, embedded) if head.swaps else (embedded, hidden)
    for row in range(rows):
        norm(first[row], head.norms[0], eps, pair[row, :width])
        norm(second[row], head.norms[1], eps, pair[row, width:])
    apply(counters, phase, pair, head.fuse, out)


@njit()
def run_head(counters, phase, embedded, hidden, stream, scratch, head, layout):
    """All rows through the module: the next phase, states for the LM head, recycled states."""
    _fuse(counters, phase, embedded, hidden, head, stream)
    phase = run_layers(counters, phase + 1, stream, scratch, head.layers, layout)
    if not head.out_norm.shape[0]:
        return phase, stream, stream
    normed = norm_rows(stream, head.out_norm, head.eps)
    return phase, normed, normed if head.recycles_normed else stream


@njit()
def run_chain(
    counters, embedded, hidden, stream, scratch, head, layout, last, later, active, embed, lm_head,
    tokens, extra, settings, buffers,
):  # fmt: skip
    """Drafts [depths, requests], those of each request as many as it asked for, and the states
    that each next depth would be fed with [depths, requests, hidden].

    The first pass has rows as `layout` say, of which `last` [requests] draft. In later ones each
    request has a row: those of the second depth as `later` says, with a row of slots [depths - 1,
    requests] for each; further ones one position on. `active` [depths]: how many requests, the
    first ones, go that deep. `extra`: tokens beside those of the LM head; `settings` are those of
    the first depth, by request.
    """
    depths, count = active.shape[0], last.shape[0]
    drafts = np.zeros((depths, count), np.int64)
    states = np.empty((depths, count, hidden.shape[1]), np.float32)
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
                later.firsts[:rows], later.lasts[:rows], later.spans, later.keeps,
            )  # fmt: skip
            phase, normed, recycled = run_head(
                counters, phase, embed[drafts[depth - 1, :rows]], recycled[:rows],
                buffers.streams[depth - 1, :rows], scratch, head, own,
            )  # fmt: skip
        logits, own_logits = buffers.logits[depth, :rows], extra.logits[depth, :rows]
        phase = draft_logits(counters, phase, normed, lm_head, logits, extra, own_logits)
        choose_drafts(
            counters, phase, logits, own_logits, settings, depth, tokens, extra,
            buffers.probs[depth, :rows], buffers.chosen[depth, :rows],
        )  # fmt: skip
        phase += 1
        for request in range(rows):
            drafts[depth, request] = buffers.chosen[depth, request]
            copy(recycled[request], states[depth, request])
    return drafts, states


@njit()
def argmax_rows(logits):
    """The column of the largest value in each row, the first of equal ones."""
    best = np.empty(logits.shape[0], np.int64)
    for row in range(logits.shape[0]):
        best[row] = argmax(logits[row])
    return best
