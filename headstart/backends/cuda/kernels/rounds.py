"""The bookkeeping of a round on the device: which rows to run next, what was accepted.

Each request has an index. `lengths` counts its tokens (below 1: the index is free), the newest of
which no pass has read yet; `left` how many more it may get. The head still has to read the last
`pending` tokens: `tokens` holds them, `states` the trunk states that go with them. A request with
none pending has no head: its newest token is the first of `tokens`, and stays there.

B requests, C pending rows at most, R = K + 1 rows of a verification, D width, P tokens per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit


def head_rows(
    lengths: Tensor, pending: Tensor, tables: Tensor, block_size: int, rows: int, module: int,
    drafts: int, left: Tensor, limits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows that bring a module up to date: positions and kv_slots [B * rows], `seen` [B].

    Row r of a request fills the slot of its r-th pending token, rows after those the slots of its
    first `drafts` drafts where it may have one more; others have place -1. A module has no entry in
    slots up to its own number, and its rotary positions begin after them.
    """
    return _rows(
        lengths, left, pending, limits, tables, block_size, rows, is_head=True, module=module,
        drafts=drafts,
    )  # fmt: skip


def trunk_rows(
    lengths: Tensor, left: Tensor, limits: Tensor, tables: Tensor, block_size: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a verification: the newest token and its drafts, of which `limits` [B] count."""
    return _rows(lengths, left, limits, limits, tables, block_size, rows, is_head=False)


def pack_trunk_rows(
    lengths: Tensor, left: Tensor, limits: Tensor, tables: Tensor, block_size: int, drafted: Tensor,
    ids: Tensor, positions: Tensor, kv_slots: Tensor,
) -> Tensor:  # fmt: skip
    """The same into the first rows of a packed pass [M], with their tokens; `seen` [B].

    drafted [B, R]: the newest token and its drafts. Rows behind those of the last request, which is
    the last with a length, stay as they are.
    """
    requests, rows = drafted.shape
    seen = torch.empty(requests, dtype=torch.int32, device=lengths.device)
    _place_rows[(requests,)](
        lengths, left, limits, limits, tables, positions, kv_slots, seen, drafted, ids,
        tables.stride(0), drafted.stride(0), 0, 0, ROWS=rows, BLOCK=triton.next_power_of_2(rows),
        PAGE=block_size, IS_HEAD=False, IS_PACKED=True, num_warps=1,
    )  # fmt: skip
    return seen


def _rows(
    lengths: Tensor, left: Tensor, counts: Tensor, limits: Tensor, tables: Tensor, block_size: int,
    rows: int, *, is_head: bool, module: int = 0, drafts: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    requests = lengths.shape[0]
    positions = torch.empty(requests * rows, dtype=torch.int64, device=lengths.device)
    kv_slots = torch.empty(requests * rows, dtype=torch.int32, device=lengths.device)
    seen = torch.empty(requests, dtype=torch.int32, device=lengths.device)
    _place_rows[(requests,)](
        lengths, left, counts, limits, tables, positions, kv_slots, seen, None, None,
        tables.stride(0), 0, module, drafts, ROWS=rows, BLOCK=triton.next_power_of_2(rows),
        PAGE=block_size, IS_HEAD=is_head, IS_PACKED=False, num_warps=1,
    )  # fmt: skip
    return positions, kv_slots, seen


def chain_rows(
    lengths: Tensor, left: Tensor, limits: Tensor, tables: Tensor, block_size: int, depth: int,
    module: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One row per request: the draft of depth - 1 goes through `module` to give that of `depth`."""
    requests = lengths.shape[0]
    positions = torch.empty(requests, dtype=torch.int64, device=lengths.device)
    kv_slots = torch.empty(requests, dtype=torch.int32, device=lengths.device)
    seen = torch.empty(requests, dtype=torch.int32, device=lengths.device)
    _place_chain[(requests,)](
        lengths, left, limits, tables, positions, kv_slots, seen, tables.stride(0), depth, module,
        PAGE=block_size, num_warps=1,
    )  # fmt: skip
    return positions, kv_slots, seen


def accept(
    drafts: Tensor, choices: Tensor, limits: Tensor, lengths: Tensor, left: Tensor,
    pending: Tensor, tokens: Tensor, emitted: Tensor, *, has_read: bool,
) -> None:  # fmt: skip
    """Take over what a verification chose; `limits` and what comes before it is only read.

    drafts [B, K], choices [B, K + 1]; emitted [B, K + 2] is for the host: how many choices count,
    then the choices. They become the pending ones where the head has read those before
    (`has_read`), and join them where it has not.
    """
    requests, rows = choices.shape
    _accept[(requests,)](
        drafts, choices, limits, lengths, left, pending, tokens, emitted, drafts.stride(0),
        tokens.stride(0), emitted.stride(0), DRAFTS=rows - 1, BLOCK=triton.next_power_of_2(rows),
        HAS_READ=has_read, num_warps=1,
    )  # fmt: skip


def keep_states(
    rows: Tensor, states: Tensor, boundary: Tensor, lengths: Tensor, pending: Tensor,
    emitted: Tensor, tables: Tensor, block_size: int,
) -> None:  # fmt: skip
    """Keep a verification's states rows [B, R, D]: states [B, C, D] for the next head pass.

    Where an accepted row is the last of a block, also in boundary [blocks, D], for prefix hits.
    Requests without a head keep nothing. Runs after `accept`.
    """
    requests, count, width = rows.shape
    _keep_states[(requests, count)](
        rows, states, boundary, lengths, pending, emitted, tables, states.stride(0),
        boundary.stride(0), tables.stride(0), emitted.stride(0), width, ROWS=count,
        KEPT=states.shape[1], PAGE=block_size,
        BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def keep_boundaries(
    rows: Tensor, boundary: Tensor, lengths: Tensor, left: Tensor, pending: Tensor, tables: Tensor,
    block_size: int,
) -> None:  # fmt: skip
    """What a module gave [B, R, D] for pending tokens that are the last of a block, for the next.

    boundary [blocks, D]: a prefix hit that ends there goes on with it.
    """
    requests, count, width = rows.shape
    _keep_boundaries[(requests, count)](
        rows, boundary, lengths, left, pending, tables, boundary.stride(0), tables.stride(0),
        width, ROWS=count, PAGE=block_size, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@jit(do_not_specialize=["module", "drafts"])
def _place_rows(lengths, left, counts, limits, tables, positions, kv_slots, seen, drafted, ids,
                table_stride, drafted_stride, module, drafts, ROWS: tl.constexpr,
                BLOCK: tl.constexpr, PAGE: tl.constexpr, IS_HEAD: tl.constexpr,
                IS_PACKED: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    length = tl.load(lengths + request)
    room = tl.load(left + request)
    count = tl.load(counts + request)
    is_active = (length > 0) & (room > 0)
    if IS_HEAD:
        is_active = is_active & (count > 0)
        first = length - count  # slot of the first token of the last round
        position = first + row - 1 - module
        limit = tl.minimum(tl.load(limits + request), room - 1)
        is_valid = (row < count + tl.where(drafts < limit, drafts, 0)) & (position >= 0)
    else:
        first = length - 1
        position = first + row
        is_valid = row <= tl.minimum(count, room - 1)
    slot = first + row
    is_placed = is_valid & (row < ROWS) & (slot >= 0) & (row * 0 + is_active.to(tl.int32) > 0)
    block = tl.load(tables + request * table_stride + slot // PAGE, is_placed, 0)
    place = tl.where(is_placed, block * PAGE + slot % PAGE, -1)
    at = request * ROWS + row
    is_row = row < ROWS
    if IS_PACKED:
        is_row = is_row & (row * 0 + length > 0)
        tl.store(ids + at, tl.load(drafted + request * drafted_stride + row, is_row, 0), is_row)
    tl.store(kv_slots + at, place.to(tl.int32), is_row)
    tl.store(positions + at, tl.where(is_placed, position, 0).to(tl.int64), is_row)
    tl.store(seen + request, tl.where(is_active, first, -1).to(tl.int32))


@jit(do_not_specialize=["depth", "module"])
def _place_chain(lengths, left, limits, tables, positions, kv_slots, seen, table_stride, depth,
                 module, PAGE: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    length = tl.load(lengths + request)
    room = tl.load(left + request)
    slot = length - 2 + depth  # of the draft that this row consumes
    limit = tl.minimum(tl.load(limits + request), room - 1)
    is_active = (length > 0) & (depth <= limit)
    safe = tl.where(is_active, slot, 0)
    block = tl.load(tables + request * table_stride + safe // PAGE)
    place = block * PAGE + safe % PAGE
    tl.store(kv_slots + request, tl.where(is_active, place, -1).to(tl.int32))
    tl.store(positions + request, tl.where(is_active, safe - 1 - module, 0).to(tl.int64))
    tl.store(seen + request, tl.where(is_active, slot, -1).to(tl.int32))


@jit
def _accept(drafts, choices, limits, lengths, left, pending, tokens, emitted, draft_stride,
            token_stride, emitted_stride, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
            HAS_READ: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    is_row = row <= DRAFTS
    length = tl.load(lengths + request)
    room = tl.load(left + request)
    limit = tl.minimum(tl.load(limits + request), room - 1)
    choice = tl.load(choices + request * (DRAFTS + 1) + row, is_row, -1)
    draft = tl.load(drafts + request * draft_stride + row, row < DRAFTS, -2)
    is_wrong = (choice != draft) | (row >= limit)
    # The first wrong row gives the token that follows the accepted ones.
    accepted = tl.min(tl.where(is_wrong, row, DRAFTS), 0)
    is_active = (length > 0) & (room > 0)
    count = tl.where(is_active, accepted + 1, 0)
    unread = tl.load(pending + request)
    before = unread
    if HAS_READ:
        before = before * 0
    is_kept = (row < count) & (before + row < token_stride)
    # Where no token is allowed the choice is -1, which no embedding has; the host ends the request.
    tl.store(tokens + request * token_stride + before + row, tl.maximum(choice, 0), is_kept)
    tl.store(emitted + request * emitted_stride + 1 + row, choice, is_row)
    tl.store(emitted + request * emitted_stride, count.to(tl.int64))
    tl.store(pending + request, tl.where(unread > 0, before + count, 0).to(tl.int32))
    tl.store(lengths + request, length + count)
    tl.store(left + request, room - count)


@jit
def _keep_states(rows, states, boundary, lengths, pending, emitted, tables, state_stride,
                 boundary_stride, table_stride, emitted_stride, width, ROWS: tl.constexpr,
                 KEPT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    row = tl.program_id(1)
    count = tl.load(emitted + request * emitted_stride).to(tl.int32)
    unread = tl.load(pending + request)
    if (row < count) & (unread > 0):
        at = tl.arange(0, BLOCK)
        mask = at < width
        value = tl.load(rows + (request * ROWS + row).to(tl.int64) * width + at, mask, 0.0)
        place = unread - count + row
        base = states + request.to(tl.int64) * state_stride
        tl.store(base + place * width + at, value, mask & (at * 0 + place < KEPT))
        slot = tl.load(lengths + request) - 1 - count + row  # lengths already counts the new tokens
        if (slot + 1) % PAGE == 0:
            block = tl.load(tables + request * table_stride + slot // PAGE)
            tl.store(boundary + block.to(tl.int64) * boundary_stride + at, value, mask)


@jit
def _keep_boundaries(rows, boundary, lengths, left, pending, tables, boundary_stride, table_stride,
                     width, ROWS: tl.constexpr, PAGE: tl.constexpr,
                     BLOCK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    row = tl.program_id(1)
    count = tl.load(pending + request)
    slot = tl.load(lengths + request) - count + row
    if (row < count) & (tl.load(left + request) > 0) & ((slot + 1) % PAGE == 0):
        at = tl.arange(0, BLOCK)
        mask = at < width
        value = tl.load(rows + (request * ROWS + row).to(tl.int64) * width + at, mask, 0.0)
        block = tl.load(tables + request * table_stride + slot // PAGE)
        tl.store(boundary + block.to(tl.int64) * boundary_stride + at, value, mask)
