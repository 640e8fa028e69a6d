"""Attention over the beginning of a context that several requests share, read once for all of them.

Requests whose prompts begin alike have the same K/V blocks there. Where neighbours among the
requests of a round do, one program attends with the queries of all of them; what a request has of
its own is left to `attention.py`, which puts the parts together. Which requests share how much is
found by a kernel, from their tables: the host need not know.

B requests, R rows of each, H query heads, G key/value heads, D head size, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.softmax import take_in

LINES = 64  # of a program: queries of a key, of as many requests as fit
PIECES = 4  # that a shared beginning is cut into
LEAST = 512  # tokens that are worth it: putting parts together takes time, too
_CHUNK = 256  # entries of tables that are compared at a time
_FAR = tl.constexpr(1 << 30)


@dataclass(frozen=True)
class SharedPrefix:
    """What requests share, and where the results for it go."""

    lengths: Tensor  # [B] int32: leading slots that a request shares with its neighbours; 0: none
    partial: Tensor  # [B, G, PIECES, T, D] fp32
    sums: Tensor  # [B, G, PIECES, T] fp32: logarithms of the sums of weights
    step: int  # tokens


def shared_lengths(tables: Tensor, seen: Tensor, neighbours: int, *, block_size: int) -> Tensor:
    """tables [B, blocks] int32, seen [B] (negative: no request) -> `SharedPrefix.lengths`."""
    count = seen.shape[0]
    lengths = torch.empty_like(seen)
    _shared_lengths[(triton.cdiv(count, neighbours),)](
        tables, seen, lengths, count, tables.stride(0), PAGE=block_size, NEIGHBOURS=neighbours,
        LEAST=LEAST, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    return lengths


def attend_shared(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor, *,
    block_size: int, first_slot: int, rows: int, tile: int, neighbours: int,
) -> SharedPrefix:  # fmt: skip
    """q [B * R, H, D] of requests that share `lengths`; `tile` lines are kept for each request."""
    count, (heads, dim) = lengths.shape[0], q.shape[-2:]
    kv_heads = k_cache.shape[1]
    kept = count, kv_heads, PIECES, tile
    partial = torch.empty(*kept, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(kept, dtype=torch.float32, device=q.device)
    is_wide = q.element_size() > 2  # products of fp32 keep both sides in registers
    step = 32 if is_wide else 64
    _attend_shared[(triton.cdiv(count, neighbours), kv_heads, PIECES)](
        q, k_cache, v_cache, tables, lengths, partial, sums, count, tables.stride(0), dim**-0.5,
        first_slot, ROWS=rows, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim), TILE=tile, NEIGHBOURS=neighbours, PAGE=block_size,
        STEP=step, IS_OPEN=first_slot == 0, num_warps=8 if is_wide or dim > 128 else 4,
        num_stages=2 if is_wide else 3,
    )  # fmt: skip
    return SharedPrefix(lengths, partial, sums, step)


@jit
def _shared_lengths(tables, seen, lengths, count, table_stride, PAGE: tl.constexpr,
                    NEIGHBOURS: tl.constexpr, LEAST: tl.constexpr,
                    CHUNK: tl.constexpr):  # fmt: skip
    member = tl.program_id(0) * NEIGHBOURS + tl.arange(0, NEIGHBOURS)
    first = tl.load(seen + member, member < count, -1)
    is_there = first >= 0
    leader = tl.min(tl.where(is_there, member, _FAR), 0)
    # Blocks that all rows of all of them see as a whole.
    shared = tl.where(tl.sum(is_there.to(tl.int32), 0) > 1,
                      tl.min(tl.where(is_there, first, _FAR), 0) // PAGE, 0)  # fmt: skip
    fewest = shared
    for start in range(0, fewest, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        is_entry = entry < fewest
        wanted = tl.load(tables + leader.to(tl.int64) * table_stride + entry, is_entry, 0)
        mask = is_there[:, None] & is_entry[None, :]
        where = member.to(tl.int64)[:, None] * table_stride + entry[None, :]
        differs = mask & (tl.load(tables + where, mask, 0) != wanted[None, :])
        shared = tl.minimum(shared, tl.min(tl.min(tl.where(differs, entry[None, :], _FAR), 1), 0))
    length = shared * PAGE
    length = tl.where(length >= LEAST, length, 0)
    tl.store(lengths + member, tl.where(is_there, length, 0), member < count)


@jit
def shared_piece(length, PIECES: tl.constexpr, STEP: tl.constexpr):
    """Tokens of a piece of what is shared."""
    return tl.cdiv(tl.cdiv(length, PIECES), STEP) * STEP


@jit(do_not_specialize=["first_slot", "count"])
def _attend_shared(q, k_cache, v_cache, tables, lengths, partial, sums, count, table_stride, scale,
                   first_slot, ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                   GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                   TILE: tl.constexpr, NEIGHBOURS: tl.constexpr, PAGE: tl.constexpr,
                   STEP: tl.constexpr, IS_OPEN: tl.constexpr):  # fmt: skip
    kv_head, part = tl.program_id(1), tl.program_id(2)
    begin = tl.program_id(0) * NEIGHBOURS
    member = begin + tl.arange(0, NEIGHBOURS)
    shared = tl.load(lengths + member, member < count, 0)
    length = tl.max(shared, 0)
    each = shared_piece(length, tl.num_programs(2), STEP)
    start = part * each
    if start < length:
        leader = tl.min(tl.where(shared > 0, member, _FAR), 0)
        line = tl.arange(0, NEIGHBOURS * TILE)
        request, own = begin + line // TILE, line % TILE
        is_there = tl.load(lengths + request, request < count, 0) > 0
        is_line = is_there & (own < ROWS * GROUP)
        at = tl.arange(0, BLOCK_D)
        is_dim = at < DIM
        place = (request * ROWS + own // GROUP) * HEADS + kv_head * GROUP + own % GROUP
        mask = is_line[:, None] & is_dim[None, :]
        query = tl.load(q + place.to(tl.int64)[:, None] * DIM + at[None, :], mask, 0.0)
        best = tl.full((NEIGHBOURS * TILE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((NEIGHBOURS * TILE,), dtype=tl.float32)
        value = tl.zeros((NEIGHBOURS * TILE, BLOCK_D), dtype=tl.float32)
        stop = tl.minimum(start + each, length)
        table = tables + leader.to(tl.int64) * table_stride
        last = line * 0 + _FAR  # every row sees all that is shared
        open_stop = start
        if IS_OPEN:
            open_stop = start + (stop - start) // STEP * STEP
            for at_slot in range(start, open_stop, STEP):
                best, total, value = take_in(
                    query, k_cache, v_cache, table, at_slot, stop, last, first_slot, kv_head, at,
                    at, scale, best, total, value, KV_HEADS, DIM, DIM, PAGE, STEP, False,
                )  # fmt: skip
        for at_slot in range(open_stop, stop, STEP):
            best, total, value = take_in(
                query, k_cache, v_cache, table, at_slot, stop, last, first_slot, kv_head, at,
                at, scale, best, total, value, KV_HEADS, DIM, DIM, PAGE, STEP, True,
            )  # fmt: skip
        is_known = total > 0
        whole = tl.where(is_known, total, 1.0)
        base = ((request * KV_HEADS + kv_head) * tl.num_programs(2) + part) * TILE + own
        tl.store(sums + base, tl.where(is_known, best + tl.log(whole), float("-inf")), is_there)
        where = base.to(tl.int64)[:, None] * DIM + at[None, :]
        tl.store(partial + where, value / whole[:, None], is_there[:, None] & is_dim[None, :])
