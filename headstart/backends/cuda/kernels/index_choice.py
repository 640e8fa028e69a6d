"""Which entries rows of latent attention see, where an indexer says: scores, and the best of them.

A row's score of a token is the sum over the index heads of weight * relu(query * key). Of equal
scores the earlier token's counts. What was chosen is given as slots of the cache in the order of
the text, one list for each row: attention reads them as blocks of one slot.

B requests, R rows of each, M = B R, H index heads, D their size, K tokens that a row sees at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

_STEP = 64  # tokens of a program that scores
_TILE = 2048  # tokens that a program which chooses looks at together
_BINS = tl.constexpr(256)


@dataclass(frozen=True)
class Texts:
    """What the rows of B requests may see, as `paged_attention` has it."""

    tables: Tensor  # [B, blocks] int32
    seen: Tensor  # [B] int32: the slot of the first row; -1: no request
    rows: int
    block_size: int
    max_context: int  # tokens that any of them sees at most
    first_slot: int = 0


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, texts: Texts, top_k: int) -> Tensor:
    """q [B R, H, D], weights [B R, H] fp32, keys [slots, D] -> scores [B R, max_context] fp32.

    Undefined where a row does not see a token, and for requests whose rows all see K at most.
    """
    lines, heads, dim = q.shape
    assert q.is_contiguous() and weights.is_contiguous() and keys.is_contiguous()
    result = torch.empty(lines, texts.max_context, dtype=torch.float32, device=q.device)
    _scores[(triton.cdiv(texts.max_context, _STEP), texts.seen.shape[0])](
        q, weights, keys, texts.tables, texts.seen, result, texts.tables.stride(0),
        texts.max_context, texts.first_slot, top_k, ROWS=texts.rows, HEADS=heads, DIM=dim,
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=texts.block_size, STEP=_STEP,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return result


def choose_entries(scores: Tensor, texts: Texts, top_k: int, lines: int) -> tuple[Tensor, Tensor]:
    """Of `lines` rows the slots [M, K] int32 that each sees, and where its last one stands [M].

    -1 there: a row of no request.
    """
    chosen = torch.empty(lines, top_k, dtype=torch.int32, device=scores.device)
    last = torch.empty(lines, dtype=torch.int32, device=scores.device)
    _choose[(lines,)](
        scores, texts.tables, texts.seen, chosen, last, texts.tables.stride(0),
        texts.max_context, texts.first_slot, top_k, ROWS=texts.rows, PAGE=texts.block_size,
        TILE=min(_TILE, triton.next_power_of_2(texts.max_context)), num_warps=8,
    )  # fmt: skip
    return chosen, last


@jit(do_not_specialize=["first_slot", "table_stride", "max_context"])
def _scores(q, weights, keys, tables, seen, scores, table_stride, max_context, first_slot, top_k,
            ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr,
            BLOCK_D: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    request = tl.program_id(1)
    first = tl.load(seen + request)
    length = tl.minimum(first + ROWS, max_context)
    start = tl.program_id(0) * STEP
    if (first >= 0) & (start < length) & (length - first_slot > top_k):
        slot = start + tl.arange(0, STEP)
        is_slot = slot < length
        block = tl.load(tables + request.to(tl.int64) * table_stride + slot // PAGE, is_slot, 0)
        at = tl.arange(0, BLOCK_D)
        head = tl.arange(0, BLOCK_H)
        where = (block.to(tl.int64) * PAGE + slot % PAGE)[:, None] * DIM + at[None, :]
        key = tl.load(keys + where, is_slot[:, None] & (at < DIM)[None, :], 0.0)
        is_query = (head < HEADS)[:, None] & (at < DIM)[None, :]
        for row in range(ROWS):
            line = request.to(tl.int64) * ROWS + row
            source = q + (line * HEADS + head)[:, None] * DIM + at[None, :]
            query = tl.load(source, is_query, 0.0)
            weight = tl.load(weights + line * HEADS + head, head < HEADS, 0.0)
            found = tl.dot(query, tl.trans(key), input_precision="ieee")
            total = tl.sum(tl.maximum(found, 0.0) * weight[:, None], 0)
            total = tl.where(total == 0, 0.0, total)  # of both signs there is one
            tl.store(scores + line * max_context + slot, total, is_slot)


@jit
def _ordered(score):
    """Whole numbers in the order of fp32 numbers."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@jit(do_not_specialize=["first_slot", "table_stride", "max_context"])
def _choose(scores, tables, seen, chosen, last, table_stride, max_context, first_slot, top_k,
            ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    request = line // ROWS
    first = tl.load(seen + request)
    length = tl.where(first < 0, 0, first + (line % ROWS).to(tl.int32) + 1)
    source = scores + line * max_context
    table = tables + request * table_stride
    count = tl.maximum(length - first_slot, 0)
    at = tl.arange(0, TILE)
    # The score of the last one that counts, 8 bits after 8 bits, and how many of its equals count.
    bound = tl.zeros((1,), dtype=tl.uint32)
    needed = tl.zeros((1,), dtype=tl.int32) + top_k
    bins = tl.arange(0, _BINS)
    if count > top_k:
        for digit in tl.static_range(4):
            found = tl.zeros((_BINS,), dtype=tl.int32)
            for start in range(first_slot, length, TILE):
                slot = start + at
                is_slot = slot < length
                key = _ordered(tl.load(source + slot, is_slot, 0.0))
                is_like = is_slot
                if digit > 0:
                    is_like = is_slot & (key >> (32 - 8 * digit) == bound >> (32 - 8 * digit))
                own = (key >> (24 - 8 * digit)) & 0xFF
                found += tl.histogram(own.to(tl.int32), _BINS, is_like)
            above = tl.sum(found, 0) - tl.cumsum(found, 0)
            is_bin = (above < needed) & (above + found >= needed)
            found_bin = tl.sum(tl.where(is_bin, bins, 0), 0).to(tl.uint32)
            bound = bound | (found_bin << (24 - 8 * digit))
            needed = needed - tl.sum(tl.where(is_bin, above, 0), 0)
    num_equal = 0
    num_chosen = 0
    target = chosen + line * top_k
    for start in range(first_slot, length, TILE):
        slot = start + at
        is_slot = slot < length
        is_chosen = is_slot
        if count > top_k:
            key = _ordered(tl.load(source + slot, is_slot, 0.0))
            is_equal = is_slot & (key == bound)
            rank = num_equal + tl.cumsum(is_equal.to(tl.int32), 0)
            is_chosen = is_slot & ((key > bound) | (is_equal & (rank <= needed)))
            num_equal += tl.sum(is_equal.to(tl.int32), 0)
        place = num_chosen + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        block = tl.load(table + slot // PAGE, is_chosen, 0)
        tl.store(target + place, block * PAGE + slot % PAGE, is_chosen)
        num_chosen += tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(last + line, num_chosen - 1)
