"""Attention of prompts: many rows per request over a paged K/V cache, causal from the end.

A program takes a tile of one request's rows and one query head, and walks the context up to its
last row; only the last steps need a mask, and with a window the first ones. The slots of every
request's context are given one after another, so contexts may lie anywhere in the cache and nothing
is gathered before.

T rows of all requests, H query heads, G key/value heads, D head size, V that of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.attention_fp8 import prompt_fp8
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.softmax import gathered_by_2

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_NOTHING = tl.constexpr(-1e30)  # the best score of a row that has seen nothing yet


@dataclass(frozen=True)
class Tile:
    """Rows of a program, tokens of a step, warps, stages."""

    rows: int = 64
    tokens: int = 64
    warps: int = 4
    stages: int = 2


DEFAULT = Tile()  # the fastest on an H200, for prompts of 2500 tokens and heads of 128


def tiles_of(num_rows: Sequence[int], tile: Tile = DEFAULT) -> list[tuple[int, int]]:
    """(request, first row) of every program, the longest walks first."""
    starts = [
        (first, request)
        for request, count in enumerate(num_rows)
        for first in range(0, count, tile.rows)
    ]
    return [(request, first) for first, request in sorted(starts, reverse=True)]


def prompt_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Tensor, tiles: Tensor,
    row_edges: Tensor, context_edges: Tensor, tile: Tile = DEFAULT, *, into: Tensor | None = None,
    sizes: Tensor | None = None, window: int | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, H, D], caches [slots, G, D or V], context [all contexts] int32 -> [T, H, V].

    tiles [programs, 2] int32 from `tiles_of`; row_edges and context_edges [B + 1] int32 say where
    each request begins. The last row of a request sees all of its context, the row before it
    one slot less, and so on. `into`: where results go; rows without a tile are left alone.
    sizes: of 8-bit floats, window and sinks: as `paged_attention` has them.
    """
    _, heads, dim = q.shape
    v_dim = dim if sizes is not None else v_cache.shape[2]
    result = q.new_empty(*q.shape[:2], v_dim) if into is None else into
    caches: tuple[Tensor, ...] = (k_cache, v_cache)
    kernel, block_d = _prompt, triton.next_power_of_2(dim)
    own: dict[str, int | Tensor | None] = {
        "sinks": sinks, "VALUE": v_dim, "BLOCK_V": triton.next_power_of_2(v_dim),
        "WINDOW": window or 0,
    }  # fmt: skip
    if sizes is not None:
        assert window is None and sinks is None, "such layers keep K/V in the model's own type"
        kernel, block_d, own = prompt_fp8, max(16, block_d // 2), {}
        caches = (*caches, sizes.view(torch.int32))
    kernel[(tiles.shape[0], heads)](
        q, *caches, context, tiles, row_edges, context_edges, result,
        dim**-0.5 * LOG2_E, HEADS=heads, KV_HEADS=k_cache.shape[1], DIM=dim,
        BLOCK_D=block_d, BLOCK_M=tile.rows, BLOCK_N=tile.tokens, **own,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return result


@jit
def _prompt(q, k_cache, v_cache, context, tiles, row_edges, context_edges, result, scale, sinks,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    request = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(row_edges + request)
    num_rows = tl.load(row_edges + request + 1) - begin
    slots = tl.load(context_edges + request)
    length = tl.load(context_edges + request + 1) - slots
    row = first + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_D)
    value_at = tl.arange(0, BLOCK_V)
    is_row = row[:, None] < num_rows
    place = ((begin + row).to(tl.int64) * HEADS + head)[:, None]
    query = tl.load(q + place * DIM + at[None, :], is_row & (at[None, :] < DIM), 0.0)
    last = length - num_rows + row  # the last slot that a row sees
    best = tl.full((BLOCK_M,), _NOTHING, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if sinks is not None:
        best = row * 0 + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    value = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    # Up to here every row of the tile sees everything; with a window from `open_start` on.
    open_stop = (length - num_rows + first + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(length - num_rows + first + BLOCK_M, length)
    start = first * 0
    if WINDOW:
        start = tl.maximum(length - num_rows + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        open_start = tl.cdiv(tl.maximum(stop - WINDOW, 0), BLOCK_N) * BLOCK_N
        open_start = tl.maximum(tl.minimum(open_start, open_stop), start)
        best, total, value = _walk(
            query, k_cache, v_cache, context + slots, best, total, value, last, start, open_start,
            length, kv_head, at, value_at, scale, KV_HEADS, DIM, VALUE, BLOCK_N, WINDOW, True,
        )  # fmt: skip
        start = open_start
        open_stop = tl.maximum(open_stop, open_start)
    best, total, value = _walk(
        query, k_cache, v_cache, context + slots, best, total, value, last, start, open_stop,
        length, kv_head, at, value_at, scale, KV_HEADS, DIM, VALUE, BLOCK_N, WINDOW, False,
    )  # fmt: skip
    best, total, value = _walk(
        query, k_cache, v_cache, context + slots, best, total, value, last, open_stop, stop,
        length, kv_head, at, value_at, scale, KV_HEADS, DIM, VALUE, BLOCK_N, WINDOW, True,
    )  # fmt: skip
    value = value / tl.where(total > 0, total, 1.0)[:, None]
    target = result + place * VALUE + value_at[None, :]
    tl.store(target, value.to(result.dtype.element_ty), is_row & (value_at[None, :] < VALUE))


@jit
def _walk(query, k_cache, v_cache, slots, best, total, value, last, start, stop, length, kv_head,
          at, value_at, scale, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
          BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, IS_MASKED: tl.constexpr):  # fmt: skip
    """Take in the keys and values of context [start, stop)."""
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + token, token < length, 0).to(tl.int64)
        where = (slot * KV_HEADS + kv_head)[:, None]
        keys = tl.load(k_cache + where * DIM + at[None, :], at[None, :] < DIM, 0.0)
        source = v_cache + where * VALUE + value_at[None, :]
        values = tl.load(source, value_at[None, :] < VALUE, 0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if IS_MASKED:
            is_seen = token[None, :] <= last[:, None]
            if WINDOW:
                is_seen = is_seen & (token[None, :] > last[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        best, total, value = gathered_by_2(scores, values, best, total, value)
    return best, total, value
