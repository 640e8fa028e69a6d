"""Attention of a few new rows per request over a paged K/V cache, cut along the context.

The query heads that share a key/value head, times the rows of a request, are the rows of one
tile, so every key is read once. Cuts have a fixed number of tokens: a result does not depend on
who else is in the batch.

B requests, R rows of each, H query heads, G key/value heads, D head size, P tokens per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_STEP = 64


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, seen: Tensor, *,
    block_size: int, max_context: int, cut: int = 512, first_slot: int = 0,
) -> Tensor:  # fmt: skip
    """q [B, R, H, D], caches [slots, G, D], tables [B, blocks] int32 -> [B, R, H, D].

    Row r of request b sees slots [first_slot, seen[b] + r]; `seen` [B] is the first row's slot. A
    negative `seen` is a place without a request: its result is zero. max_context bounds seen + R.
    """
    batch, rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    cuts = triton.cdiv(max_context, cut)
    tile = max(16, triton.next_power_of_2(rows * group))
    partial = torch.empty(batch, kv_heads, cuts, tile, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch, kv_heads, cuts, tile, dtype=torch.float32, device=q.device)
    _attend[(batch, kv_heads, cuts)](
        q, k_cache, v_cache, tables, seen, partial, sums, tables.stride(0), dim**-0.5, first_slot,
        ROWS=rows, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim), TILE=tile, PAGE=block_size, CUT=cut,
        STEP=min(TOKENS_PER_STEP, cut), num_warps=4, num_stages=3,
    )  # fmt: skip
    result = torch.empty_like(q)
    _combine[(batch, heads, rows)](
        partial, sums, seen, result, cuts,
        ROWS=rows, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim), TILE=tile, CUT=cut,
        BLOCK_C=triton.next_power_of_2(cuts), num_warps=1,
    )  # fmt: skip
    return result


@triton.jit
def _attend(q, k_cache, v_cache, tables, seen, partial, sums, table_stride, scale, first_slot,
            ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
            DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
            CUT: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(seen + request)
    start = part * CUT
    length = first + ROWS  # slots that the last row sees
    if (first >= 0) & (start < length):
        line = tl.arange(0, TILE)
        row = line // GROUP
        head = kv_head * GROUP + line % GROUP
        is_line = line < ROWS * GROUP
        at = tl.arange(0, BLOCK_D)
        is_dim = at < DIM
        place = ((request * ROWS + row) * HEADS + head) * DIM
        query = tl.load(q + place[:, None] + at[None, :], is_line[:, None] & is_dim[None, :], 0.0)
        best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE,), dtype=tl.float32)
        value = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
        stop = tl.minimum(start + CUT, length)
        for place_in_cut in range(start, stop, STEP):
            slot = place_in_cut + tl.arange(0, STEP)
            is_slot = slot < stop
            block = tl.load(tables + request * table_stride + slot // PAGE, is_slot, 0)
            where = (block.to(tl.int64) * PAGE + slot % PAGE) * KV_HEADS + kv_head
            mask = is_slot[:, None] & is_dim[None, :]
            keys = tl.load(k_cache + where[:, None] * DIM + at[None, :], mask, 0.0)
            # Asked for together: with one step per program there is no next one to overlap with.
            values = tl.load(v_cache + where[:, None] * DIM + at[None, :], mask, 0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            is_seen = (slot[None, :] <= first + row[:, None]) & (slot[None, :] >= first_slot)
            scores = tl.where(is_seen & is_slot[None, :], scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            # A line may have seen nothing yet; -inf - -inf would be NaN.
            safe = tl.where(top == float("-inf"), 0.0, top)
            weights = tl.exp(scores - safe[:, None])
            shrink = tl.exp(best - safe)
            total = total * shrink + tl.sum(weights, 1)
            value = value * shrink[:, None]
            value = tl.dot(weights.to(values.dtype), values, value, input_precision="ieee")
            best = top
        base = ((request * KV_HEADS + kv_head) * tl.num_programs(2) + part) * TILE + line
        is_known = total > 0
        whole = tl.where(is_known, total, 1.0)
        tl.store(sums + base, tl.where(is_known, best + tl.log(whole), float("-inf")))
        tl.store(
            partial + base[:, None] * DIM + at[None, :], value / whole[:, None], is_dim[None, :]
        )


@triton.jit
def _combine(partial, sums, seen, result, cuts, ROWS: tl.constexpr, HEADS: tl.constexpr,
             KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
             TILE: tl.constexpr, CUT: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = tl.load(seen + request)
    at = tl.arange(0, BLOCK_D)
    is_dim = at < DIM
    used = tl.where(first >= 0, tl.cdiv(first + ROWS, CUT), 0)  # cuts that were computed
    part = tl.arange(0, BLOCK_C)
    line = row * GROUP + head % GROUP
    base = ((request * KV_HEADS + head // GROUP) * cuts + part) * TILE + line
    is_part = part < used
    sum_ = tl.load(sums + base, is_part, float("-inf"))
    top = tl.max(sum_, 0)
    share = tl.where(is_part, tl.exp(sum_ - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    values = tl.load(
        partial + base[:, None] * DIM + at[None, :], is_part[:, None] & is_dim[None, :], 0.0
    )
    whole = tl.sum(share, 0)
    value = tl.sum(values * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    place = ((request * ROWS + row) * HEADS + head) * DIM
    tl.store(result + place + at, value.to(result.dtype.element_ty), is_dim)
