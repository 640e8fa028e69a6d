"""Attention over keys and values in 8-bit floats: of few rows (`attention.py`), and of prompts.

As there, but every tile of the cache has both halves of the dimensions in its words (`kv_fp8.py`):
scores are the sum of two products, and two results are gathered, one for each half.

H query heads, G key/value heads, D head size; caches are int16 [slots, G, D / 2], sizes int32
[slots, G].
"""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.kv_fp8 import for_products, fp8_halves, powers
from headstart.backends.cuda.kernels.softmax import piece


@jit
def _halves_of(rows, place, at, is_row, HALF: tl.constexpr):
    """Both halves of the numbers that begin at `place`."""
    where = rows + place[:, None] + at[None, :]
    mask = is_row[:, None] & (at < HALF)[None, :]
    low = tl.load(where, mask, 0.0)
    high = tl.load(where + HALF, mask, 0.0)
    return for_products(low), for_products(high)


@jit
def _store_halves(target, place, at, low, high, is_row, HALF: tl.constexpr):
    where = target + place[:, None] + at[None, :]
    mask = is_row[:, None] & (at < HALF)[None, :]
    tl.store(where, low.to(target.dtype.element_ty), mask)
    tl.store(where + HALF, high.to(target.dtype.element_ty), mask)


@jit
def _scores(low, high, k_cache, words, mask, of_keys):
    """[L, N] of queries [L, D / 2] twice and the keys whose words are there."""
    k_low, k_high = fp8_halves(tl.load(k_cache + words, mask, 0), low)
    sums = tl.dot(low, tl.trans(k_low), input_precision="ieee")
    sums = tl.dot(high, tl.trans(k_high), sums, input_precision="ieee")
    return sums * of_keys[None, :]


@jit
def _gather(weights, shrink, values, of_values, low, high, like):
    """What weights [L, N] gather of values, added to both halves."""
    v_low, v_high = fp8_halves(values, like)
    shares = (weights * of_values[None, :]).to(v_low.dtype)
    low = tl.dot(shares, v_low, low * shrink[:, None], input_precision="ieee")
    high = tl.dot(shares, v_high, high * shrink[:, None], input_precision="ieee")
    return low, high


@jit(do_not_specialize=["first_slot"])
def attend_fp8(q, k_cache, v_cache, sizes, tables, seen, usual, starts, counts, partial, sums,
               result, table_stride, scale, first_slot, ROWS: tl.constexpr, HEADS: tl.constexpr,
               KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
               BLOCK_D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr,
               CUT: tl.constexpr, STEP: tl.constexpr, IS_WHOLE: tl.constexpr,
               IS_PACKED: tl.constexpr, IS_OPEN: tl.constexpr):  # fmt: skip
    """`attention._attend`; BLOCK_D is of a half."""
    HALF: tl.constexpr = DIM // 2
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Later pieces, which long contexts alone have, begin first: the last to begin end together.
    part = tl.num_programs(2) - 1 - tl.program_id(2)
    first = tl.load(seen + request)
    first_row, num_rows = request * ROWS, ROWS
    if IS_PACKED:
        first_row, num_rows = tl.load(starts + request), tl.load(counts + request)
    length = first + num_rows  # slots that the last row sees
    each = piece(length, tl.num_programs(2), usual, LEAST, CUT, STEP)
    start = part * each
    line = tl.arange(0, TILE)
    row = line // GROUP
    head = kv_head * GROUP + line % GROUP
    is_line = (line < ROWS * GROUP) & (row < num_rows)
    at = tl.arange(0, BLOCK_D)
    place = ((first_row + row) * HEADS + head) * DIM
    # Pieces are not put together then, so a place without a request is made zero here.
    if IS_WHOLE and not IS_PACKED:
        if first < 0:
            nothing = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
            _store_halves(result, place, at, nothing, nothing, is_line, HALF)
    if (first >= 0) & (num_rows > 0) & (start < length):
        q_low, q_high = _halves_of(q, place, at, is_line, HALF)
        best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE,), dtype=tl.float32)
        low = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
        high = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
        stop = tl.minimum(start + each, length)
        table, open_stop = tables + request * table_stride, start
        if IS_OPEN:  # up to here every row sees everything
            open_stop = start + tl.maximum(tl.minimum(stop, first + 1) - start, 0) // STEP * STEP
            for at_slot in range(start, open_stop, STEP):
                best, total, low, high = _take_in(
                    q_low, q_high, k_cache, v_cache, sizes, table, at_slot, stop, first + row,
                    first_slot, kv_head, at, scale, best, total, low, high, KV_HEADS, HALF, PAGE,
                    STEP, False,
                )  # fmt: skip
        for at_slot in range(open_stop, stop, STEP):
            best, total, low, high = _take_in(
                q_low, q_high, k_cache, v_cache, sizes, table, at_slot, stop, first + row,
                first_slot, kv_head, at, scale, best, total, low, high, KV_HEADS, HALF, PAGE, STEP,
                True,
            )  # fmt: skip
        is_known = total > 0
        whole = tl.where(is_known, total, 1.0)
        low = low / whole[:, None]
        high = high / whole[:, None]
        if each >= length:  # one piece is all
            _store_halves(result, place, at, low, high, is_line, HALF)
        else:
            base = ((request * KV_HEADS + kv_head) * tl.num_programs(2) + part) * TILE + line
            tl.store(sums + base, tl.where(is_known, best + tl.log(whole), float("-inf")))
            _store_halves(partial, base * DIM, at, low, high, line < TILE, HALF)


@jit
def _take_in(q_low, q_high, k_cache, v_cache, sizes, table, start, stop, last, first_slot, kv_head,
             at, scale, best, total, low, high, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
             PAGE: tl.constexpr, STEP: tl.constexpr, IS_MASKED: tl.constexpr):  # fmt: skip
    """Keys and values of slots [start, start + STEP), of which each line sees those up to `last`.

    Without a mask all slots are there and all lines see them.
    """
    slot = start + tl.arange(0, STEP)
    mask = (at < HALF)[None, :]
    if IS_MASKED:
        mask = (slot < stop)[:, None] & mask
        block = tl.load(table + slot // PAGE, slot < stop, 0)
        where = (block.to(tl.int64) * PAGE + slot % PAGE) * KV_HEADS + kv_head
        both = tl.load(sizes + where, slot < stop, 0)
    else:
        block = tl.load(table + slot // PAGE)
        where = (block.to(tl.int64) * PAGE + slot % PAGE) * KV_HEADS + kv_head
        both = tl.load(sizes + where)
    of_keys, of_values = powers(both)
    words = where[:, None] * HALF + at[None, :]
    # Asked for together: with one step per program there is no next one to overlap with.
    values = tl.load(v_cache + words, mask, 0)
    scores = _scores(q_low, q_high, k_cache, words, mask, of_keys * scale)
    if IS_MASKED:
        is_seen = (slot[None, :] <= last[:, None]) & (slot[None, :] >= first_slot)
        scores = tl.where(is_seen & (slot < stop)[None, :], scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    low, high = _gather(weights, shrink, values, of_values, low, high, q_low)
    return top, total, low, high


@jit
def prompt_fp8(q, k_cache, v_cache, sizes, context, tiles, row_edges, context_edges, result, scale,
               HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """`prompts._prompt`; BLOCK_D is of a half."""
    HALF: tl.constexpr = DIM // 2
    request = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(row_edges + request)
    num_rows = tl.load(row_edges + request + 1) - begin
    slots = tl.load(context_edges + request)
    length = tl.load(context_edges + request + 1) - slots
    row = first + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_D)
    place = ((begin + row).to(tl.int64) * HEADS + head) * DIM
    q_low, q_high = _halves_of(q, place, at, row < num_rows, HALF)
    last = length - num_rows + row  # the last slot that a row sees
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    low = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    high = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    # Up to here every row of the tile sees everything.
    open_stop = (length - num_rows + first + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(length - num_rows + first + BLOCK_M, length)
    best, total, low, high = _walk(
        q_low, q_high, k_cache, v_cache, sizes, context + slots, best, total, low, high, last, 0,
        open_stop, length, kv_head, at, scale, KV_HEADS, HALF, BLOCK_N, False,
    )  # fmt: skip
    best, total, low, high = _walk(
        q_low, q_high, k_cache, v_cache, sizes, context + slots, best, total, low, high, last,
        open_stop, stop, length, kv_head, at, scale, KV_HEADS, HALF, BLOCK_N, True,
    )  # fmt: skip
    whole = tl.where(total > 0, total, 1.0)[:, None]
    _store_halves(result, place, at, low / whole, high / whole, row < num_rows, HALF)


@jit
def _walk(q_low, q_high, k_cache, v_cache, sizes, slots, best, total, low, high, last, start, stop,
          length, kv_head, at, scale, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
          BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr):  # fmt: skip
    """Take in the keys and values of context [start, stop)."""
    is_dim = (at < HALF)[None, :]
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + token, token < length, 0).to(tl.int64)
        of_head = slot * KV_HEADS + kv_head
        of_keys, of_values = powers(tl.load(sizes + of_head))
        words = of_head[:, None] * HALF + at[None, :]
        values = tl.load(v_cache + words, is_dim, 0)
        scores = _scores(q_low, q_high, k_cache, words, is_dim, of_keys * scale)
        if IS_MASKED:
            scores = tl.where(token[None, :] <= last[:, None], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(weights, 1)
        low, high = _gather(weights, shrink, values, of_values, low, high, q_low)
        best = top
    return best, total, low, high
