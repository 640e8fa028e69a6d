"""Attention of prompts over unfolded latents: many rows per request, causal from the end.

As `prompts.py`, but a key has two parts: what the latent was unfolded to, of each head its own,
and the rotated part, which is one for all heads. So nothing is copied together.

T rows of all requests, L entries of all contexts, H heads; N numbers of a query and key without
positions, P of their rotated part, V of a value, E of an entry, which ends with a rotated key.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.prompts import DEFAULT, LOG2_E, Tile
from headstart.backends.cuda.kernels.softmax import gathered_by_2


def prompt_latents(
    q: Tensor, unfolded: Tensor, entries: Tensor, tiles: Tensor, row_edges: Tensor,
    context_edges: Tensor, result: Tensor, *, scale: float, first_head: int = 0,
    tile: Tile = DEFAULT,
) -> None:  # fmt: skip
    """q [T, H, N + P], unfolded [L, h, N + V], entries [L, E] -> result [T, H, V], filled.

    Heads first_head to first_head + h are computed. tiles, row_edges and context_edges are those of
    `prompt_attention`; entries of all contexts lie one after another.
    """
    _, heads, dim = q.shape
    _, some, both = unfolded.shape
    v_dim = result.shape[2]
    nope = both - v_dim
    rope = dim - nope
    block_n, block_p, block_v = (
        max(16, triton.next_power_of_2(size)) for size in (nope, rope, v_dim)
    )
    # Steps of wider heads, as GLM-4.7-Flash has them, would not fit into the registers.
    tokens = tile.tokens if max(block_n, block_v) <= 128 else min(tile.tokens, 32)
    _prompt[(tiles.shape[0], some)](
        q, unfolded, entries, tiles, row_edges, context_edges, result, scale * LOG2_E, first_head,
        HEADS=heads, SOME=some, NOPE=nope, ROPE=rope, VALUE=v_dim, ENTRY=entries.shape[1],
        BLOCK_N=block_n, BLOCK_P=block_p, BLOCK_V=block_v, BLOCK_M=tile.rows, STEP=tokens,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@jit(do_not_specialize=["first_head"])
def _prompt(q, unfolded, entries, tiles, row_edges, context_edges, result, scale, first_head,
            HEADS: tl.constexpr, SOME: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
            VALUE: tl.constexpr, ENTRY: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
            STEP: tl.constexpr):  # fmt: skip
    request = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(row_edges + request)
    num_rows = tl.load(row_edges + request + 1) - begin
    context = tl.load(context_edges + request)
    length = tl.load(context_edges + request + 1) - context
    row = first + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_N)
    turned = tl.arange(0, BLOCK_P)
    value_at = tl.arange(0, BLOCK_V)
    is_row = row[:, None] < num_rows
    place = (begin + row).to(tl.int64)[:, None] * HEADS + first_head + head
    source = q + place * (NOPE + ROPE)
    query = tl.load(source + at[None, :], is_row & (at[None, :] < NOPE), 0.0)
    query_turned = tl.load(source + NOPE + turned[None, :], is_row & (turned[None, :] < ROPE), 0.0)
    last = length - num_rows + row  # the last entry that a row sees
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    value = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    keys = unfolded + (context.to(tl.int64) * SOME + head) * (NOPE + VALUE)
    turned_keys = entries + context.to(tl.int64) * ENTRY + ENTRY - ROPE
    # Up to here every row of the tile sees everything.
    open_stop = (length - num_rows + first + 1) // STEP * STEP
    stop = tl.minimum(length - num_rows + first + BLOCK_M, length)
    best, total, value = _walk(
        query, query_turned, keys, turned_keys, best, total, value, last, 0, open_stop, length, at,
        turned, value_at, scale, SOME, NOPE, ROPE, VALUE, ENTRY, STEP, False,
    )  # fmt: skip
    best, total, value = _walk(
        query, query_turned, keys, turned_keys, best, total, value, last, open_stop, stop, length,
        at, turned, value_at, scale, SOME, NOPE, ROPE, VALUE, ENTRY, STEP, True,
    )  # fmt: skip
    value = value / tl.where(total > 0, total, 1.0)[:, None]
    target = result + place * VALUE + value_at[None, :]
    tl.store(target, value.to(result.dtype.element_ty), is_row & (value_at[None, :] < VALUE))


@jit
def _walk(query, query_turned, keys, turned_keys, best, total, value, last, start, stop, length, at,
          turned, value_at, scale, SOME: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
          VALUE: tl.constexpr, ENTRY: tl.constexpr, STEP: tl.constexpr,
          IS_MASKED: tl.constexpr):  # fmt: skip
    """Take in the entries [start, stop) of a context."""
    for first in range(start, stop, STEP):
        token = first + tl.arange(0, STEP)
        # Beyond the context the last entry is read again, and masked.
        place = tl.minimum(token, length - 1).to(tl.int64)[:, None]
        key = keys + place * (SOME * (NOPE + VALUE))
        own = tl.load(key + at[None, :], at[None, :] < NOPE, 0.0)
        shared = tl.load(turned_keys + place * ENTRY + turned[None, :], turned[None, :] < ROPE, 0.0)
        values = tl.load(key + NOPE + value_at[None, :], value_at[None, :] < VALUE, 0.0)
        scores = tl.dot(query, tl.trans(own), input_precision="ieee")
        scores = tl.dot(query_turned, tl.trans(shared), scores, input_precision="ieee") * scale
        if IS_MASKED:
            scores = tl.where(token[None, :] <= last[:, None], scores, float("-inf"))
        best, total, value = gathered_by_2(scores, values, best, total, value)
    return best, total, value
