"""Steps of attention over a paged K/V cache, for kernels that read it in different ways."""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.softmax import gathered


@jit
def take_in(query, k_cache, v_cache, table, start, stop, last, first_slot, kv_head, at, scale,
            best, total, value, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
            STEP: tl.constexpr, IS_MASKED: tl.constexpr):  # fmt: skip
    """Keys and values of slots [start, start + STEP), of which each line sees those up to `last`.

    Without a mask all slots are there and all lines see them.
    """
    slot = start + tl.arange(0, STEP)
    mask = (at < DIM)[None, :]
    if IS_MASKED:
        mask = (slot < stop)[:, None] & mask
        block = tl.load(table + slot // PAGE, slot < stop, 0)
    else:
        block = tl.load(table + slot // PAGE)
    where = (block.to(tl.int64) * PAGE + slot % PAGE) * KV_HEADS + kv_head
    keys = tl.load(k_cache + where[:, None] * DIM + at[None, :], mask, 0.0)
    # Asked for together: with one step per program there is no next one to overlap with.
    values = tl.load(v_cache + where[:, None] * DIM + at[None, :], mask, 0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if IS_MASKED:
        is_seen = (slot[None, :] <= last[:, None]) & (slot[None, :] >= first_slot)
        scores = tl.where(is_seen & (slot < stop)[None, :], scores, float("-inf"))
    return gathered(scores, values, best, total, value)


@jit
def add_pieces(partial, sums, first, count, line, is_line, at, best, whole, value,
               DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Take in `count` pieces from number `first` on, which other programs have computed."""
    for start in range(0, count, BLOCK_C):
        part = start + tl.arange(0, BLOCK_C)
        is_part = (part[:, None] < count) & is_line[None, :]
        base = (first + part[:, None]) * TILE + line[None, :]
        sum_ = tl.load(sums + base, is_part, float("-inf"))
        top = tl.maximum(best, tl.max(sum_, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp(sum_ - safe[None, :])
        shrink = tl.exp(best - safe)
        where = base[:, :, None] * DIM + at[None, None, :]
        is_value = is_part[:, :, None] & (at < DIM)[None, None, :]
        values = tl.load(partial + where, is_value, 0.0)
        whole = whole * shrink + tl.sum(share, 0)
        value = value * shrink[:, None] + tl.sum(values * share[:, :, None], 0)
        best = top
    return best, whole, value
