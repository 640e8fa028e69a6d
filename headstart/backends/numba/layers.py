"""Decoder layers for some rows, a module of a head, and whole chains of drafts, as one call each.

One call runs all layers, whatever formats their matrices have (`calls.py`). A chain of drafts reads
what the trunk left behind, chooses a token, reads that token and its own state, and so on. Every
depth has logits, choices and a stream of its own: a late thread must not find those of a later
depth.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.calls import apply
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.context import attend
from headstart.backends.numba.noise import argmax
from headstart.backends.numba.rows import ONE, copy, norm, rotate, swiglu
from headstart.backends.numba.sampling import FIRST, choose_rows
from headstart.backends.numba.thread_pool import claim, finish, wait
from headstart.backends.numba.vectors import LANES

# norms [L, hidden]; matrices as `calls.py` has them [L, FIELDS]; eps of all norms
Layers = namedtuple("Layers", "attention_norm qkv o mlp_norm gate_up down eps")
# With its memory: keys [L, groups, kv_heads, dim, 16], values [L, slots, kv_heads, dim].
Model = namedtuple("Model", "layers keys values angles")
# Of each row [rows]: its position, its own slot, and which of `kv_slots` it sees.
# `runs`: from each place on, how many follow one another. Up to ROWS_PER_ITEM rows of a request
# attend together: `firsts` and `lasts` (the row behind) of each such group.
RowLayout = namedtuple("RowLayout", "positions slots kv_slots runs begins ends firsts lasts")
ROWS_PER_ITEM = 2  # more would leave threads without work
# By position [positions, rotated dimensions].
Angles = namedtuple("Angles", "cos sin")
# Shared between the threads of a call: q, k and v; rotated queries [kv_heads, rows * heads that
# share keys, dim]; attention's output;
# gate and up; all others [rows, width].
Scratch = namedtuple("Scratch", "qkv queries attended gate_up")
PHASES = 6  # of a layer: qkv, rotate and store, attend, o, gate and up, down


@njit()
def _rotate_and_store(counters, phase, scratch, keys, values, layout, angles):
    """Rotate q and k; k and v go to their slots. An item is a row."""
    rows, (kv_heads, dim) = layout.slots.shape[0], values.shape[1:]
    heads = scratch.attended.shape[1] // dim
    group = heads // kv_heads
    scale = np.float32(1 / np.sqrt(dim))
    while True:
        begin, end = claim(counters, phase, rows)
        if begin >= rows:
            break
        for row in range(begin, end):
            cos, sin = angles.cos[layout.positions[row]], angles.sin[layout.positions[row]]
            slot, qkv = layout.slots[row], scratch.qkv[row]
            for head in range(kv_heads):
                for number in range(group):
                    q, own = (head * group + number) * dim, row * group + number
                    rotate(qkv[q : q + dim], cos, sin, scale, scratch.queries[head, own])
                k = (heads + head) * dim
                v = k + kv_heads * dim
                rotate(qkv[k : k + dim], cos, sin, ONE, keys[slot // LANES, head, :, slot % LANES])
                copy(qkv[v : v + dim], values[slot, head])
        finish(counters, phase, end - begin)
    wait(counters, phase, rows)


@njit()
def _attend(counters, phase, scratch, keys, values, layout):
    """What every row sees: an item is those heads of a few rows that share keys."""
    kv_heads, dim = values.shape[1:]
    heads = scratch.attended.shape[1] // (kv_heads * dim)  # that share keys
    counts = np.empty(ROWS_PER_ITEM * heads, np.int64)
    found = np.empty((ROWS_PER_ITEM * heads, dim), np.float32)
    items = layout.firsts.shape[0] * kv_heads
    while True:
        begin, end = claim(counters, phase, items)
        if begin >= items:
            break
        for item in range(begin, end):
            together, head = divmod(item, kv_heads)
            first, last = layout.firsts[together], layout.lasts[together]
            start, queries = layout.begins[first], (last - first) * heads
            for row in range(first, last):
                for number in range((row - first) * heads, (row - first + 1) * heads):
                    counts[number] = layout.ends[row] - start
            seen = slice(start, layout.ends[last - 1])
            attend(
                scratch.queries[head, first * heads : last * heads], keys, values, head,
                layout.kv_slots[seen], layout.runs[seen], counts[:queries], found[:queries],
            )  # fmt: skip
            for number in range(queries):
                row, own = divmod(number, heads)
                begins = (head * heads + own) * dim
                copy(found[number], scratch.attended[first + row, begins : begins + dim])
        finish(counters, phase, end - begin)
    wait(counters, phase, items)


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
def norm_rows(x, weight, eps):
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        norm(x[row], weight, eps, out[row])
    return out


@njit()
def _swiglu_rows(gate_up):
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
    for row in range(gate_up.shape[0]):
        swiglu(gate_up[row], out[row])
    return out


@njit(inline="always")  # by itself it would be optimised once more than it is called
def run_layers(counters, phase, stream, scratch, model, layout):
    """The residual stream [rows, hidden] through all layers, in place, by a thread pool.

    Norms, rounding and gates are computed by every thread for itself: that takes less time than
    waiting for another. `phase` is the first; returns the one behind the last. No phase writes
    what it reads. `scratch` may have more rows than there are.
    """
    layers, rows = model.layers, stream.shape[0]
    qkv, attended = scratch.qkv[:rows], scratch.attended[:rows]
    gate_up = scratch.gate_up[:rows]
    for layer in range(model.keys.shape[0]):
        keys, values = model.keys[layer], model.values[layer]
        normed = norm_rows(stream, layers.attention_norm[layer], layers.eps)
        apply(counters, phase, normed, layers.qkv, layer, qkv, False)
        _rotate_and_store(counters, phase + 1, scratch, keys, values, layout, model.angles)
        _attend(counters, phase + 2, scratch, keys, values, layout)
        apply(counters, phase + 3, attended, layers.o, layer, stream, True)
        normed = norm_rows(stream, layers.mlp_norm[layer], layers.eps)
        apply(counters, phase + 4, normed, layers.gate_up, layer, gate_up, False)
        apply(counters, phase + 5, _swiglu_rows(gate_up), layers.down, layer, stream, True)
        phase += PHASES
    return phase


@njit()
def run_trunk(counters, stream, scratch, model, layout, final_norm, lm_head, wanted, logits):
    """All layers; the final norm of all rows, and logits of those that are wanted."""
    phase = run_layers(counters, FIRST, stream, scratch, model, layout)
    normed = norm_rows(stream, final_norm, model.layers.eps)
    if wanted.shape[0]:
        apply(counters, phase, normed[wanted], lm_head, FIRST, logits, False)
    return normed


# norms [2, hidden], of what comes first and second; out_norm [hidden], or nothing where there is
# none; `swaps`: the state comes before the token.
Head = namedtuple("Head", "model norms fuse out_norm swaps recycles_normed")
# What a chain writes: streams [depths - 1, requests, hidden], logits [depths, requests, columns],
# chosen columns [depths, requests], what was drawn from [depths, requests, tokens or 0].
ChainBuffers = namedtuple("ChainBuffers", "streams logits chosen probs")


HEAD_PHASES = PHASES + 3  # of one depth: fusing, the block, the LM head, the choice


@njit(inline="always")
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
    tokens, settings, buffers,
):  # fmt: skip
    """Drafts [depths, requests], those of each request as many as it asked for, and the states
    that each next depth would be fed with [depths, requests, hidden].

    The first pass has rows as `layout` say, of which `last` [requests] draft. In later ones each
    request has a row: those of the second depth as `later` says, with a row of slots [depths - 1,
    requests] for each; further ones one position on. `active` [depths]: how many requests, the
    first ones, go that deep. `settings` are those of the first depth, by request.
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
                later.firsts[:rows], later.lasts[:rows],
            )  # fmt: skip
            phase, normed, recycled = run_head(
                counters, phase, embed[drafts[depth - 1, :rows]], recycled[:rows],
                buffers.streams[depth - 1, :rows], scratch, head, own,
            )  # fmt: skip
        logits = buffers.logits[depth, :rows]
        apply(counters, phase, normed, lm_head, FIRST, logits, False)
        choose_rows(
            counters, phase + 1, logits, settings, depth, tokens, buffers.probs[depth, :rows],
            buffers.chosen[depth, :rows],
        )  # fmt: skip
        phase += 2
        for request in range(rows):  # where no token is allowed any will do
            drafts[depth, request] = tokens[max(buffers.chosen[depth, request], 0)]
            copy(recycled[request], states[depth, request])
    return drafts, states


@njit()
def argmax_rows(logits):
    """The column of the largest value in each row, the first of equal ones."""
    best = np.empty(logits.shape[0], np.int64)
    for row in range(logits.shape[0]):
        best[row] = argmax(logits[row])
    return best
