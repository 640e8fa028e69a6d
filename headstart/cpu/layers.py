"""Decoder layers one after another for some rows: a whole trunk, or the block of a head, per call.

Matrices of all layers lie in one array per kind, so that one call can run them all.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.cpu.compiler import njit
from headstart.cpu.context import LANES, attend
from headstart.cpu.crew import claim, finish, wait
from headstart.cpu.products import product, round_rows
from headstart.cpu.rows import gate, norm, turn

# One kind of matrix in all layers: packed [L, tiles, bytes], scales and bias [L, N], levels [L].
Matrices = namedtuple("Matrices", "packed scales bias levels")
# norms [L, hidden]; eps of all norms
Layers = namedtuple("Layers", "attention_norm qkv o mlp_norm gate_up down eps")
# keys [L, groups, kv_heads, dim, 16], values [L, slots, kv_heads, dim]
Caches = namedtuple("Caches", "keys values")
# Of each row [rows]: the angle it is turned by, its own slot, and which of `places` it sees.
# `runs`: from each place on, how many follow one another.
Seats = namedtuple("Seats", "positions slots places runs begins ends")
# By position [positions, rotated dimensions].
Angles = namedtuple("Angles", "cos sin")


# Shared between the threads of a call: q, k and v; turned queries; what was seen; gate and up.
Scratch = namedtuple("Scratch", "qkv queries seen both")
PHASES = 6  # of a layer: qkv, place, attend, o, gate and up, down


@njit()
def _apply(board, phase, x, matrices, layer, out, adds):
    """Rows x [rows, K] through one layer's matrix."""
    inputs, scales = round_rows(x, matrices.levels[layer])
    product(
        board, phase, matrices.packed[layer], matrices.scales[layer], matrices.bias[layer],
        inputs, scales, out, adds,
    )  # fmt: skip


@njit()
def _place(board, phase, scratch, keys, values, seats, angles):
    """Turn q and k; k and v go to their slots. An item is a row."""
    rows, (kv_heads, dim) = seats.slots.shape[0], values.shape[1:]
    heads = scratch.queries.shape[1] // dim
    scale = np.float32(1 / np.sqrt(dim))
    while True:
        begin, end = claim(board, phase, rows)
        if begin >= rows:
            break
        for row in range(begin, end):
            cos, sin = angles.cos[seats.positions[row]], angles.sin[seats.positions[row]]
            slot, qkv = seats.slots[row], scratch.qkv[row]
            for head in range(heads):
                part = slice(head * dim, (head + 1) * dim)
                turn(qkv[part], cos, sin, scratch.queries[row, part])
            scratch.queries[row] *= scale
            for head in range(kv_heads):
                k = (heads + head) * dim
                v = k + kv_heads * dim
                turn(qkv[k : k + dim], cos, sin, keys[slot // LANES, head, :, slot % LANES])
                values[slot, head] = qkv[v : v + dim]
        finish(board, phase, end - begin)
    wait(board, phase, rows)


@njit()
def _attend(board, phase, scratch, keys, values, seats):
    """What every row sees: an item is those of its heads that share keys."""
    kv_heads, dim = values.shape[1:]
    rows, width = scratch.queries.shape
    group = width // (kv_heads * dim)
    queries = scratch.queries.reshape((rows, kv_heads, group, dim))
    found = scratch.seen.reshape((rows, kv_heads, group, dim))
    items = rows * kv_heads
    while True:
        begin, end = claim(board, phase, items)
        if begin >= items:
            break
        for item in range(begin, end):
            row, head = divmod(item, kv_heads)
            own = slice(seats.begins[row], seats.ends[row])
            attend(
                queries[row, head], keys, values, head, seats.places[own], seats.runs[own],
                found[row, head],
            )  # fmt: skip
        finish(board, phase, end - begin)
    wait(board, phase, items)


@njit()
def norm_rows(x, weight, eps):
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        norm(x[row], weight, eps, out[row])
    return out


@njit()
def _gate_rows(both):
    out = np.empty((both.shape[0], both.shape[1] // 2), np.float32)
    for row in range(both.shape[0]):
        gate(both[row], out[row])
    return out


@njit()
def run_layers(board, stream, scratch, layers, caches, seats, angles):
    """The residual stream [rows, hidden] through all layers, in place, by a crew.

    Norms, rounding and gates are computed by everybody for himself: that takes less time than
    waiting for somebody.
    """
    for layer in range(caches.keys.shape[0]):
        phase, keys, values = layer * PHASES, caches.keys[layer], caches.values[layer]
        normed = norm_rows(stream, layers.attention_norm[layer], layers.eps)
        _apply(board, phase, normed, layers.qkv, layer, scratch.qkv, False)
        _place(board, phase + 1, scratch, keys, values, seats, angles)
        _attend(board, phase + 2, scratch, keys, values, seats)
        _apply(board, phase + 3, scratch.seen, layers.o, layer, stream, True)
        normed = norm_rows(stream, layers.mlp_norm[layer], layers.eps)
        _apply(board, phase + 4, normed, layers.gate_up, layer, scratch.both, False)
        gated = _gate_rows(scratch.both)
        _apply(board, phase + 5, gated, layers.down, layer, stream, True)


@njit()
def fuse(board, first, second, norms, matrices, eps, out):
    """What enters a head's block: both halves [rows, hidden] normed, side by side, one product."""
    rows, hidden = first.shape
    pair = np.empty((rows, 2 * hidden), np.float32)
    for row in range(rows):
        norm(first[row], norms[0], eps, pair[row, :hidden])
        norm(second[row], norms[1], eps, pair[row, hidden:])
    _apply(board, 0, pair, matrices, 0, out, False)
