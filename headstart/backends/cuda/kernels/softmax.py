"""A softmax over a context that is read piece by piece, for kernels that attend.

Of a step: `best` is the largest score of each line so far, `total` the sum of its weights and
`value` what they have gathered, both relative to `best`.
"""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit


@jit
def piece(length, cuts, usual, LEAST: tl.constexpr, CUT: tl.constexpr, STEP: tl.constexpr):
    """Tokens of a piece."""
    each = length * 0 + CUT
    if CUT == 0:
        least = length * 0 + LEAST
        if usual is not None:
            least = tl.load(usual)
        each = tl.cdiv(tl.maximum(tl.cdiv(length, cuts), least), STEP) * STEP
    return each


@jit
def gathered(scores, values, best, total, value):
    """The next scores [L, N] and values [N, D]. A line may have seen nothing, and see nothing."""
    top = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    value = value * shrink[:, None]
    value = tl.dot(weights.to(values.dtype), values, value, input_precision="ieee")
    return top, total, value


@jit
def gathered_by_2(scores, values, best, total, value):
    """The same where scores are logarithms to base 2.

    `best` of a line that has seen nothing is finite, or it sees something at once.
    """
    top = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(best - top)
    total = total * shrink + tl.sum(weights, 1)
    value = value * shrink[:, None]
    value = tl.dot(weights.to(values.dtype), values, value, input_precision="ieee")
    return top, total, value


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
