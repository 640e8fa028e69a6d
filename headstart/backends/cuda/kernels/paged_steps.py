"""Steps of attention over a paged K/V cache, for kernels that read it in different ways."""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.softmax import gathered


@jit
def take_in(query, k_cache, v_cache, table, start, stop, last, first_slot, kv_head, at, value_at,
            scale, best, total, value, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
            VALUE: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
            IS_MASKED: tl.constexpr):  # fmt: skip
    """Keys and values of slots [start, start + STEP), of which each line sees those up to `last`.

    From `first_slot` on, one for all lines or [L, 1]. Without a mask all slots are there and all
    lines see them.
    """
    slot = start + tl.arange(0, STEP)
    mask = (at < DIM)[None, :]
    value_mask = (value_at < VALUE)[None, :]
    if IS_MASKED:
        mask = (slot < stop)[:, None] & mask
        value_mask = (slot < stop)[:, None] & value_mask
        block = tl.load(table + slot // PAGE, slot < stop, 0)
    else:
        block = tl.load(table + slot // PAGE)
    where = (block.to(tl.int64) * PAGE + slot % PAGE) * KV_HEADS + kv_head
    keys = tl.load(k_cache + where[:, None] * DIM + at[None, :], mask, 0.0)
    # Asked for together: with one step per program there is no next one to overlap with.
    values = tl.load(v_cache + where[:, None] * VALUE + value_at[None, :], value_mask, 0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if IS_MASKED:
        is_seen = (slot[None, :] <= last[:, None]) & (slot[None, :] >= first_slot)
        scores = tl.where(is_seen & (slot < stop)[None, :], scores, float("-inf"))
    return gathered(scores, values, best, total, value)
