"""Attention of a few new rows per request over a paged K/V cache, cut along the context.

The query heads that share a key/value head, times the rows of a request, are the rows of one
tile, so every key is read once. A context is cut into a given number of equal pieces, or into
pieces of a fixed number of tokens: then a result does not depend on how long the context is.

With a window a row sees so many tokens, itself included. A sink is a further score of a head, with
nothing behind it: the first piece begins with it.

B requests, R rows of each, H query heads, G key/value heads, D head size, V that of values, P
tokens per block; M rows of a packed pass, in which rows of several kinds lie one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.attention_cuts import (
    Cut,
    fitted,
    neighbours_of,
    rows_fitting,
    tile_of,
)
from headstart.backends.cuda.kernels.attention_fp8 import attend_fp8
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.pieces import combine
from headstart.backends.cuda.kernels.shared_prefix import SharedPrefix, attend_shared
from headstart.backends.cuda.kernels.softmax import piece, take_in

# Up to so many requests -> lines of a program that puts pieces together, and pieces per step.
_COMBINING = ((4, (1, 32)), (8, (1, 16)), (32, (2, 8)), (1 << 30, (16, 1)))
_WIDE = 64  # lines from which on masks cost more than a second loop without them
_LEAST_OF_WINDOW = 256  # tokens: windows are short, and putting pieces together takes time, too


@dataclass(frozen=True)
class Packed:
    """Which rows of a packed pass [M, H, D] are those of each request, and where results go."""

    rows: int  # of a request at most
    result: Tensor  # [M, ...] with room for H V numbers of each row, or more
    starts: Tensor | None = None  # [B] int32, the first row of each; None: `rows` after `rows`
    counts: Tensor | None = None  # [B] int32, rows of each, where there are `starts`

    def result_of(self, heads: int, dim: int) -> Tensor:
        """Room for results [M, H, V] of a layer's geometry."""
        rows = self.result.shape[0]
        return self.result.view(-1)[: rows * heads * dim].view(rows, heads, dim)

    def part(self, at: int, each: int, seen: Tensor) -> Packed:
        """Rows [at, at + each) of every request."""
        starts, counts = self.starts, self.counts
        if starts is None or counts is None:
            starts = torch.arange(len(seen), dtype=torch.int32, device=seen.device) * self.rows
            counts = torch.full_like(starts, self.rows)
        rows = min(each, self.rows - at)
        return Packed(rows, self.result, starts + at, (counts - at).clamp_max(each))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, seen: Tensor, *,
    block_size: int, max_context: int, cut: Cut, first_slot: int = 0, packed: Packed | None = None,
    usual: Tensor | None = None, shared: Tensor | None = None, sizes: Tensor | None = None,
    window: int | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [B, R, H, D], caches [slots, G, D or V], tables [B, blocks] int32 -> [B, R, H, V].

    Row r of request b sees slots [first_slot, seen[b] + r]; `seen` [B] is the first row's slot. A
    negative `seen` is a place without a request: its result is zero. max_context bounds seen + R.
    With `packed` q is [M, H, D], and with `starts` rows of no request stay as they are in its
    result; without them those of such a place are made zero, for which there must be room.
    usual: from `usual_context`. shared: from `shared_prefix.shared_lengths`, of as many requests
    as `neighbours_of` says; where rows fit into one program, and K/V are not in 8 bits. sizes
    [slots, G, 2] int16: of keys and values in 8-bit floats, of which caches hold words
    [slots, G, D / 2]. window: tokens that a row sees at most, itself included; sinks [H].
    """
    assert not cut.lines, "all queries that share a key are one program's"
    batch, (heads, dim) = seen.shape[0], q.shape[-2:]
    rows = q.shape[1] if packed is None else packed.rows
    kv_heads = k_cache.shape[1]
    v_dim = dim if sizes is not None else v_cache.shape[2]
    group = heads // kv_heads
    block_d = triton.next_power_of_2(dim)
    block_v = triton.next_power_of_2(v_dim)
    fitting = rows_fitting(group, block_d, q.element_size())
    assert shared is None or rows <= fitting
    if rows > fitting:  # as many rows as a program has room for, one part after the other
        each = triton.cdiv(rows, triton.cdiv(rows, fitting))
        parts = [
            paged_attention(
                q if packed is not None else q[:, at : at + each].contiguous(), k_cache, v_cache,
                tables, torch.where(seen < 0, seen, seen + at), block_size=block_size,
                max_context=max_context, cut=cut, first_slot=first_slot,
                packed=packed and packed.part(at, each, seen), usual=usual, sizes=sizes,
                window=window, sinks=sinks,
            )
            for at in range(0, rows, each)
        ]  # fmt: skip
        return torch.cat(parts, 1) if packed is None else packed.result_of(heads, v_dim)
    # No more pieces than the longest context could have: programs without work take time, too.
    longest = max_context if window is None else min(max_context, window + rows)
    least = cut.least if window is None else max(cut.least, _LEAST_OF_WINDOW)
    cuts = min(cut.pieces or longest, triton.cdiv(longest, cut.tokens or least))
    tile = tile_of(rows, group)
    cut = fitted(cut, tile, block_d, q.element_size(), is_fp8=sizes is not None)
    prefix = None
    if shared is not None:
        assert packed is None or packed.starts is None, "rows of decoding requests"
        assert sizes is None and window is None and v_dim == dim
        prefix = attend_shared(
            q, k_cache, v_cache, tables, shared, block_size=block_size, first_slot=first_slot,
            rows=rows, tile=tile, neighbours=neighbours_of(rows, group),
        )  # fmt: skip
    is_whole = cuts == 1 and prefix is None
    kept = (0 if is_whole else batch, kv_heads, cuts, tile)
    partial = torch.empty(*kept, v_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(kept, dtype=torch.float32, device=q.device)
    result = q.new_empty(*q.shape[:-1], v_dim) if packed is None else packed.result_of(heads, v_dim)
    places = (None, None) if packed is None else (packed.starts, packed.counts)
    is_packed = places[0] is not None
    caches: tuple[Tensor, ...] = (k_cache, v_cache)
    begins: tuple[Tensor | None, ...] = (shared, sinks)
    kernel, own_d = _attend, block_d
    own: dict[str, int] = {"VALUE": v_dim, "BLOCK_V": block_v, "WINDOW": window or 0}
    if sizes is not None:
        assert window is None and sinks is None, "such layers keep K/V in the model's own type"
        kernel, own_d, begins, own = attend_fp8, max(16, block_d // 2), (), {}
        caches = (*caches, sizes.view(torch.int32))
    kernel[(batch, kv_heads, cuts)](
        q, *caches, tables, seen, usual, *places, *begins, partial, sums, result,
        tables.stride(0), dim**-0.5, first_slot,
        ROWS=rows, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
        BLOCK_D=own_d, TILE=tile, PAGE=block_size, LEAST=least, CUT=cut.tokens,
        STEP=cut.step, IS_WHOLE=is_whole, IS_PACKED=is_packed,
        IS_OPEN=first_slot == 0 and tile >= _WIDE and window is None, **own,
        num_warps=cut.warps, num_stages=cut.stages,
        **({} if cut.registers is None else {"maxnreg": cut.registers}),
    )  # fmt: skip
    if is_whole:
        return result
    # Few requests must fill the GPU with programs; of many a program takes several lines.
    most, per_step = next(sizes for limit, sizes in _COMBINING if batch <= limit)
    lines = min(most, triton.next_power_of_2(rows * group))
    combine[(batch, kv_heads, triton.cdiv(rows * group, lines))](
        partial, sums, seen, usual, *places, shared, *_kept_of(prefix), result, cuts,
        ROWS=rows, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, DIM=v_dim,
        BLOCK_D=block_v, TILE=tile, LEAST=least, CUT=cut.tokens, STEP=cut.step, LINES=lines,
        BLOCK_C=min(per_step, triton.next_power_of_2(cuts)), LEFT_ALONE=1,
        IS_PACKED=is_packed, SHARED_STEP=1 if prefix is None else prefix.step,
        WINDOW=window or 0, num_warps=4,
    )  # fmt: skip
    return result


def _kept_of(prefix: SharedPrefix | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if prefix is None else (prefix.partial, prefix.sums)


@jit(do_not_specialize=["first_slot"])
def _attend(q, k_cache, v_cache, tables, seen, usual, starts, counts, shared, sinks, partial, sums,
            result, table_stride, scale, first_slot, ROWS: tl.constexpr, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
            VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
            LEAST: tl.constexpr, CUT: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
            IS_WHOLE: tl.constexpr, IS_PACKED: tl.constexpr, IS_OPEN: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Later pieces, which long contexts alone have, begin first: the last to begin end together.
    part = tl.num_programs(2) - 1 - tl.program_id(2)
    first = tl.load(seen + request)
    # Decided while compiling: rows of a request by its number, or where a packed pass has them.
    first_row, num_rows = request * ROWS, ROWS
    if IS_PACKED:
        first_row, num_rows = tl.load(starts + request), tl.load(counts + request)
    length = first + num_rows  # slots that the last row sees
    begin = first * 0  # of what is the request's own, and in sight
    if shared is not None:
        begin = tl.load(shared + request)
    if WINDOW:
        begin = tl.maximum(first + 1 - WINDOW, 0)
    each = piece(length - begin, tl.num_programs(2), usual, LEAST, CUT, STEP)
    start = begin + part * each
    line = tl.arange(0, TILE)
    row = line // GROUP
    head = kv_head * GROUP + line % GROUP
    is_line = (line < ROWS * GROUP) & (row < num_rows)
    at = tl.arange(0, BLOCK_D)
    is_dim = at < DIM
    value_at = tl.arange(0, BLOCK_V)
    is_value = is_line[:, None] & (value_at < VALUE)[None, :]
    place = (first_row + row) * HEADS + head
    target = result + place[:, None] * VALUE + value_at[None, :]
    # Pieces are not put together then, so a place without a request is made zero here.
    if IS_WHOLE and not IS_PACKED:
        if first < 0:
            nothing = tl.zeros((TILE, BLOCK_V), dtype=result.dtype.element_ty)
            tl.store(target, nothing, is_value)
    if (first >= 0) & (num_rows > 0) & (start < length):
        source = q + place[:, None] * DIM + at[None, :]
        query = tl.load(source, is_line[:, None] & is_dim[None, :], 0.0)
        best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE,), dtype=tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, is_line, 0.0).to(tl.float32)
            best = tl.where(line * 0 + part == 0, sink, best)
            total = tl.where(line * 0 + part == 0, 1.0, total)
        value = tl.zeros((TILE, BLOCK_V), dtype=tl.float32)
        stop = tl.minimum(start + each, length)
        table, open_stop = tables + request * table_stride, start
        earliest = first_slot
        if WINDOW:
            earliest = tl.maximum(first + row + 1 - WINDOW, first_slot)[:, None]
        if IS_OPEN:  # up to here every row sees everything
            open_stop = start + tl.maximum(tl.minimum(stop, first + 1) - start, 0) // STEP * STEP
            for at_slot in range(start, open_stop, STEP):
                best, total, value = take_in(
                    query, k_cache, v_cache, table, at_slot, stop, first + row, earliest, kv_head,
                    at, value_at, scale, best, total, value, KV_HEADS, DIM, VALUE, PAGE, STEP,
                    False,
                )  # fmt: skip
        for at_slot in range(open_stop, stop, STEP):
            best, total, value = take_in(
                query, k_cache, v_cache, table, at_slot, stop, first + row, earliest, kv_head,
                at, value_at, scale, best, total, value, KV_HEADS, DIM, VALUE, PAGE, STEP, True,
            )  # fmt: skip
        is_known = total > 0
        whole = tl.where(is_known, total, 1.0)
        value = value / whole[:, None]
        is_alone = each >= length - begin  # one piece is all
        if shared is not None:
            is_alone = is_alone & (begin == 0)
        if is_alone:
            tl.store(target, value.to(result.dtype.element_ty), is_value)
        else:
            base = ((request * KV_HEADS + kv_head) * tl.num_programs(2) + part) * TILE + line
            tl.store(sums + base, tl.where(is_known, best + tl.log(whole), float("-inf")))
            kept = partial + base[:, None] * VALUE + value_at[None, :]
            tl.store(kept, value, (value_at < VALUE)[None, :])
