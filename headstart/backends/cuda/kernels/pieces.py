"""Pieces of a context, each attended to by a program of its own, become one result."""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.shared_prefix import PIECES as SHARED_PIECES
from headstart.backends.cuda.kernels.shared_prefix import shared_piece
from headstart.backends.cuda.kernels.softmax import piece

_PIECES = tl.constexpr(SHARED_PIECES)


@jit
def combine(partial, sums, seen, usual, starts, counts, shared, shared_partial, shared_sums, result,
            cuts, ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
            GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
            LEAST: tl.constexpr, CUT: tl.constexpr, STEP: tl.constexpr, LINES: tl.constexpr,
            BLOCK_C: tl.constexpr, LEFT_ALONE: tl.constexpr, IS_PACKED: tl.constexpr,
            SHARED_STEP: tl.constexpr = 1, WINDOW: tl.constexpr = 0):  # fmt: skip
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(seen + request)
    begin = first * 0  # of what is the request's own
    if shared is not None:
        begin = tl.load(shared + request)
    # Decided while compiling: rows of a request by its number, or where a packed pass has them.
    first_row, num_rows = request * ROWS, ROWS
    if IS_PACKED:
        first_row, num_rows = tl.load(starts + request), tl.load(counts + request)
    length = first + num_rows - begin
    if WINDOW:
        length = first + num_rows - tl.maximum(first + 1 - WINDOW, 0)
    each = piece(length, cuts, usual, LEAST, CUT, STEP)
    # Pieces that were computed.
    used = tl.where((first >= 0) & (num_rows > 0), tl.cdiv(length, each), 0)
    # LEFT_ALONE: one piece, where that is the result; none, a place without a request, is zero.
    is_open = (used != LEFT_ALONE) | (begin > 0)
    if IS_PACKED:
        is_open = is_open & (used > 0)
    if is_open:
        line = tl.program_id(2) * LINES + tl.arange(0, LINES)
        is_line = line < num_rows * GROUP
        at = tl.arange(0, BLOCK_D)
        is_dim = at < DIM
        best = tl.full((LINES,), float("-inf"), dtype=tl.float32)
        whole = tl.zeros((LINES,), dtype=tl.float32)
        value = tl.zeros((LINES, BLOCK_D), dtype=tl.float32)
        own = (request * KV_HEADS + kv_head) * cuts
        best, whole, value = add_pieces(
            partial, sums, own, used, line, is_line, at, best, whole, value, DIM, TILE, BLOCK_C
        )
        if shared is not None:
            own = (request * KV_HEADS + kv_head) * _PIECES
            each = shared_piece(begin, _PIECES, SHARED_STEP)
            used = tl.where(begin > 0, tl.cdiv(begin, tl.maximum(each, 1)), 0)
            best, whole, value = add_pieces(
                shared_partial, shared_sums, own, used, line, is_line, at, best, whole, value, DIM,
                TILE, BLOCK_C,
            )  # fmt: skip
        value = value / tl.where(whole > 0, whole, 1.0)[:, None]
        head = kv_head * GROUP + line % GROUP
        place = ((first_row + line // GROUP) * HEADS + head) * DIM
        mask = is_line[:, None] & is_dim[None, :]
        tl.store(result + place[:, None] + at[None, :], value.to(result.dtype.element_ty), mask)


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
