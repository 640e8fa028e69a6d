"""Rows of a verification in which each request has as many as it has drafts, without gaps.

Requests that copy have many drafts, those beside them few: no row is computed for drafts that are
not there. A pass is launched before it is known which requests go on copying, so there may be more
drafts than it has rows; then those of all that copy are cut alike. Requests are as in `rounds.py`;
B of them, R rows of each at most, M rows of the pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

FEW_ROWS = 4  # up to which requests attend in programs for few rows


def lanes_for(requests: int) -> int:
    """Of a program that looks at all requests.

    A power of 4, as the numbers of requests are for which kernels are compiled at the start: no
    other one has to be compiled while requests wait.
    """
    return int(4 ** (((requests - 1).bit_length() + 1) // 2))


def fit_drafts(lengths: Tensor, left: Tensor, limits: Tensor, *, most: int, rows: int) -> None:
    """Cut drafts, of which `limits` [B] count and `most` of a request at most, to a pass's rows.

    All requests have at most as many then, and the first of them one more where rows are left.
    There is a row for each request's newest token.
    """
    requests = len(limits)
    _fit_drafts[(1,)](
        lengths, left, limits, requests, rows, MOST=most,
        REQUESTS=lanes_for(requests), num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize=["requests", "total"])
def _fit_drafts(lengths, left, limits, requests, total, MOST: tl.constexpr,
                REQUESTS: tl.constexpr):  # fmt: skip
    request = tl.arange(0, REQUESTS)
    is_request = request < requests
    room = tl.load(left + request, is_request, 0)
    is_running = is_request & (tl.load(lengths + request, is_request, 0) > 0) & (room > 0)
    drafts = tl.minimum(tl.load(limits + request, is_request, 0), room - 1)
    rows = tl.where(is_running, drafts + 1, 0)
    most = MOST
    for _ in range(MOST):
        needed = tl.sum(tl.minimum(rows, most + 1), 0)
        most = tl.where(needed > total, most - 1, most)
    is_cut = rows > most + 1
    spare = total - tl.sum(tl.minimum(rows, most + 1), 0)
    has_more = tl.cumsum(is_cut.to(tl.int32), 0) <= spare
    tl.store(limits + request, most + has_more.to(tl.int32), is_cut)


def squeeze_trunk_rows(
    lengths: Tensor, left: Tensor, limits: Tensor, tables: Tensor, block_size: int, drafted: Tensor,
    ids: Tensor, positions: Tensor, kv_slots: Tensor, sources: Tensor, places: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fill the rows of a packed pass [M]; `seen`, first rows and numbers of rows [2, B].

    Of each request in two lines, which attend apart. The first has all rows of a request with at
    most `FEW_ROWS`, and the newest token of one with more; the second has the drafts of that one:
    8 or 16 of them fill the lines of a program. `seen` is the slot of the first row, -1 where there
    is none.

    drafted [B, R]: the newest token and its drafts, of which `limits` [B] count. sources [M]: which
    of [B * R] a row is, 0 for rows behind the last; places [B * R]: the row that each is, and for
    one that does not count the request's last.
    """
    (requests, rows), total, fill = drafted.shape, ids.shape[0], 128
    # Each line begins at a multiple of 16 bytes, so that kernels are compiled for that alone.
    line = triton.cdiv(requests, 4) * 4
    found = torch.empty(3, 2, line, dtype=torch.int32, device=lengths.device)
    seen, starts, counts = found[..., :requests]
    _squeeze_rows[(requests + triton.cdiv(total, fill),)](
        lengths, left, limits, tables, drafted, ids, positions, kv_slots, sources, places, seen,
        starts, counts, tables.stride(0), drafted.stride(0), line, requests, total, ROWS=rows,
        BLOCK=triton.next_power_of_2(rows), REQUESTS=lanes_for(requests), FILL=fill,
        PAGE=block_size, FEW=FEW_ROWS, num_warps=1,
    )  # fmt: skip
    return seen, starts, counts


@jit(do_not_specialize=["line", "requests", "total"])
def _squeeze_rows(lengths, left, limits, tables, drafted, ids, positions, kv_slots, sources, places,
                  seen, starts, counts, table_stride, drafted_stride, line, requests, total,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
                  FILL: tl.constexpr, PAGE: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    others = tl.arange(0, REQUESTS)
    is_other = others < requests
    all_left = tl.load(left + others, is_other, 0)
    is_running = is_other & (tl.load(lengths + others, is_other, 0) > 0) & (all_left > 0)
    all_drafts = tl.minimum(tl.load(limits + others, is_other, 0), all_left - 1)
    all_rows = tl.where(is_running, tl.minimum(all_drafts + 1, ROWS), 0)
    if request < requests:
        count = tl.sum(tl.where(others == request, all_rows, 0), 0)
        start = tl.sum(tl.where(others < request, all_rows, 0), 0)
        row = tl.arange(0, BLOCK)
        at = start + row
        first = tl.load(lengths + request) - 1
        slot = first + row
        is_row = (row < count) & (at < total)
        block = tl.load(tables + request * table_stride + slot // PAGE, is_row, 0)
        token = tl.load(drafted + request * drafted_stride + row, is_row, 0)
        tl.store(ids + at, token, is_row)
        tl.store(positions + at, slot.to(tl.int64), is_row)
        tl.store(kv_slots + at, (block * PAGE + slot % PAGE).to(tl.int32), is_row)
        tl.store(sources + at, (request * ROWS + row).to(tl.int64), is_row)
        last = tl.minimum(start + tl.maximum(count, 1), total) - 1
        tl.store(places + request * ROWS + row, tl.minimum(at, last).to(tl.int64), row < ROWS)
        has_many = count > FEW
        of_few = tl.where(has_many, 1, count)
        tl.store(seen + request, tl.where(count > 0, first, -1).to(tl.int32))
        tl.store(starts + request, start.to(tl.int32))
        tl.store(counts + request, of_few.to(tl.int32))
        other = line + request
        tl.store(seen + other, tl.where(has_many, first + 1, -1).to(tl.int32))
        tl.store(starts + other, (start + 1).to(tl.int32))
        tl.store(counts + other, tl.where(has_many, count - 1, 0).to(tl.int32))
    else:
        blank = (request - requests) * FILL + tl.arange(0, FILL)
        is_blank = (blank >= tl.sum(all_rows, 0)) & (blank < total)
        tl.store(ids + blank, (blank * 0).to(tl.int64), is_blank)
        tl.store(positions + blank, (blank * 0).to(tl.int64), is_blank)
        tl.store(kv_slots + blank, (blank * 0 - 1).to(tl.int32), is_blank)
        tl.store(sources + blank, (blank * 0).to(tl.int64), is_blank)
