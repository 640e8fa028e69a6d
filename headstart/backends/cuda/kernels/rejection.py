"""The rejection rule on a GPU: `sampling.acceptance.reject` for the requests that ask for it.

A draft is accepted where a random number times its share of the draft's distribution is below its
share of the target's. What follows a rejection is drawn from what the target has more than the
draft. Drafts behind those of the head are copied: they could be nothing else, so their share is 1.

B requests, K drafts, R = K + 1 rows of the target, N columns, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.adjusting import REJECTS, TILE, Adjusted, Settings, id_stride
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.noise import gumbel_of, noise_bits, row_keys, uniform_of
from headstart.backends.cuda.kernels.ranking import UNIT, distribution
from headstart.backends.cuda.kernels.sampling import STEP
from headstart.sampling import noise

_REJECTS = tl.constexpr(REJECTS)
_ACCEPTANCE, _RESIDUAL = tl.constexpr(noise.ACCEPTANCE), tl.constexpr(noise.RESIDUAL)


@dataclass(frozen=True)
class Shares:
    """What rows are drawn from: a token's share is exp(scaled) / weight, if it is kept."""

    values: Tensor  # [M, N]
    weights: Tensor  # [M] int64
    cuts: Tensor  # [M, 3] fp32: the last value that is kept, the largest, the factor
    columns: Tensor  # [M] int32: of the last value's tokens the last that is kept


def shares_of(adjusted: Adjusted, settings: Settings) -> Shares:
    """Of rows of requests that reject; the others are left as they are."""
    rows, columns = adjusted.values.shape
    each, tiles = rows // settings.count, adjusted.peaks.shape[1]
    device = adjusted.values.device
    weights = torch.empty(rows, dtype=torch.int64, device=device)
    cuts = torch.empty(rows, 3, dtype=torch.float32, device=device)
    last = torch.empty(rows, dtype=torch.int32, device=device)
    _shares[(rows,)](
        adjusted.values, adjusted.peaks, settings.numbers, settings.counts,
        settings.numbers.stride(0), each, weights, cuts, last, columns, tiles, TILE=TILE,
        TILES=triton.next_power_of_2(tiles), STEP=min(STEP, triton.next_power_of_2(columns)),
        num_warps=8,
    )  # fmt: skip
    return Shares(adjusted.values, weights, cuts, last)


def accept_drafts(
    target: Shares, settings: Settings, drafts: Tensor, shares: Tensor, limits: Tensor,
    of_head: Tensor, left: Tensor, lengths: Tensor,
) -> Tensor:  # fmt: skip
    """[B] int32 how many drafts [B, K] are accepted; shares [B, K] fp32 of the drafts' own.

    Of requests that do not reject: their `limits`. The first `of_head` [B] drafts are the head's.
    """
    count = settings.count
    accepted = torch.empty(count, dtype=torch.int32, device=drafts.device)
    _accept_drafts[(count,)](
        *_parts(target), settings.counts, settings.seeds, drafts, shares, limits, of_head, left,
        lengths, accepted, target.values.shape[1], target.values.shape[0] // count,
        drafts.stride(0), shares.stride(0), num_warps=1,
    )  # fmt: skip
    return accepted


def share_of_drafts(own: Shares, settings: Settings, columns: Tensor) -> Tensor:
    """[B] fp32 of the drafts that were drawn, at these columns [B]."""
    result = torch.zeros(settings.count, dtype=torch.float32, device=columns.device)
    _share_of_drafts[(settings.count,)](
        *_parts(own), settings.counts, columns, result, own.values.shape[1], num_warps=1
    )
    return result


def follow(
    target: Shares, draft: Shares, settings: Settings, drafts: Tensor, accepted: Tensor,
    choices: Tensor, limits: Tensor, of_head: Tensor, left: Tensor, lengths: Tensor,
    columns_of: Tensor | None,
) -> None:  # fmt: skip
    """Put what requests that reject emit into choices [B, R]: accepted drafts, and what follows.

    draft: of the draft [B, N] that was rejected; columns_of [V], or [B, V]: where a draft
    vocabulary has a token, -1 where it has not.
    """
    count, vocab = settings.count, target.values.shape[1]
    each, tiles = choices.shape[1], triton.cdiv(vocab, TILE)
    best = torch.empty(2, count, tiles, dtype=torch.float32, device=choices.device)
    where = torch.empty(2, count, tiles, dtype=torch.int32, device=choices.device)
    at = settings.counts, settings.seeds, limits, left, lengths, accepted
    _residual[(tiles, count)](
        *_parts(target), *_parts(draft), *at, of_head, drafts,
        accepted if columns_of is None else columns_of, best, where, vocab, draft.values.shape[1],
        each, tiles, drafts.stride(0), id_stride(columns_of),
        HAS_IDS=columns_of is not None, TILE=TILE, num_warps=4,
    )  # fmt: skip
    _follow[(count,)](
        *at, drafts, choices, best, where, each, tiles, drafts.stride(0),
        BLOCK=triton.next_power_of_2(tiles), ROWS=triton.next_power_of_2(each), num_warps=4,
    )  # fmt: skip


def _parts(shares: Shares) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return shares.values, shares.weights, shares.cuts, shares.columns


@jit(do_not_specialize=["stride", "each"])
def _shares(values, peaks, numbers, counts, stride, each, weights, cuts, last, columns, tiles,
            TILE: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // each
    if tl.load(counts + request) & _REJECTS:
        at = tl.arange(0, TILES)
        own_peaks = tl.load(peaks + row * tiles + at, at < tiles, float("-inf"))
        _, weight, value, column, largest, scale = distribution(
            values + row * columns, own_peaks, numbers, counts, stride, request, 1, columns, TILE,
            TILES, STEP,
        )  # fmt: skip
        tl.store(weights + row, weight)
        tl.store(cuts + row * 3, value)
        tl.store(cuts + row * 3 + 1, largest)
        tl.store(cuts + row * 3 + 2, scale)
        tl.store(last + row, column)


@jit
def _share(values, weights, cuts, last, row, column, is_column, columns):
    """Of tokens `column` in a row."""
    x = tl.load(values + row * columns + column, is_column, float("-inf"))
    lowest, largest = tl.load(cuts + row * 3), tl.load(cuts + row * 3 + 1)
    is_kept = (x > lowest) | ((x == lowest) & (column <= tl.load(last + row)))
    weight = tl.load(weights + row).to(tl.float32) / UNIT
    share = tl.exp((x - largest) * tl.load(cuts + row * 3 + 2)) / weight
    return tl.where(is_kept, share, 0.0)


@jit
def _share_of_drafts(values, weights, cuts, last, counts, columns_of, result, columns):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(counts + request) & _REJECTS:
        column = tl.load(columns_of + request)
        share = _share(values, weights, cuts, last, request, column, column >= 0, columns)
        tl.store(result + request, share)


@jit(do_not_specialize=["each", "draft_stride", "share_stride"])
def _accept_drafts(values, weights, cuts, last, counts, seeds, drafts, shares, limits, of_head,
                   left, lengths, accepted, columns, each, draft_stride, share_stride):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + request)
    own = tl.load(of_head + request)
    number = limit
    if tl.load(counts + request) & _REJECTS:
        most = tl.maximum(tl.minimum(limit, tl.load(left + request) - 1), 0)
        number = most * 0
        is_open = most >= 0
        while is_open & (number < most):
            token = tl.load(drafts + request * draft_stride + number)
            row = request * each + number
            share = _share(values, weights, cuts, last, row, token, token >= 0, columns)
            position = tl.load(lengths + request).to(tl.int64) + number
            first, second = row_keys(tl.load(seeds + request), position, _ACCEPTANCE)
            test = uniform_of(noise_bits(token.to(tl.int32), first, second))
            drawn = tl.load(shares + request * share_stride + number)
            is_open = test * tl.where(number < own, drawn, 1.0) < share
            number += is_open.to(tl.int32)
    tl.store(accepted + request, number)


@jit(do_not_specialize=["each", "draft_stride", "id_stride"])
def _residual(values, weights, cuts, last, d_values, d_weights, d_cuts, d_last, counts, seeds,
              limits, left, lengths, accepted, of_head, drafts, columns_of, best, where, columns,
              d_columns, each, tiles, draft_stride, id_stride, HAS_IDS: tl.constexpr,
              TILE: tl.constexpr):  # fmt: skip
    """Per tile the best token of what the target has more than the draft, and of the target."""
    tile, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = tl.load(accepted + request)
    most = tl.minimum(tl.load(limits + request), tl.load(left + request) - 1)
    if ((tl.load(counts + request) & _REJECTS) != 0) & (number < most):
        column = tile * TILE + tl.arange(0, TILE)
        is_column = column < columns
        row = request * each + number
        share = _share(values, weights, cuts, last, row, column, is_column, columns)
        own = column
        if HAS_IDS:
            own = tl.load(columns_of + request * id_stride + column, is_column, -1)
        drafted = _share(
            d_values, d_weights, d_cuts, d_last, request, tl.maximum(own, 0),
            is_column & (own >= 0), d_columns,
        )  # fmt: skip
        drafted = tl.where(own >= 0, drafted, 0.0)
        token = tl.load(drafts + request * draft_stride + number)
        is_copied = number >= tl.load(of_head + request)
        drafted = tl.where(is_copied, (column == token).to(tl.float32), drafted)
        position = tl.load(lengths + request).to(tl.int64) + number
        first, second = row_keys(tl.load(seeds + request), position, _RESIDUAL)
        drawn = gumbel_of(noise_bits(column, first, second))
        at = request * tiles + tile
        behind = tl.num_programs(1) * tiles
        for kind in tl.static_range(2):
            rest = tl.maximum(share - drafted, 0.0) if kind == 0 else share
            total = tl.log(tl.where(rest > 0, rest, 1.0)) + drawn
            total = tl.where(is_column & (rest > 0), total, float("-inf"))
            top = tl.max(total, 0)
            tl.store(best + kind * behind + at, top)
            tl.store(
                where + kind * behind + at, tl.min(tl.where(total == top, column, 2147483647), 0)
            )


@jit(do_not_specialize=["each", "draft_stride"])
def _follow(counts, seeds, limits, left, lengths, accepted, drafts, choices, best, where, each,
            tiles, draft_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    if tl.load(counts + request) & _REJECTS:
        number = tl.load(accepted + request)
        most = tl.minimum(tl.load(limits + request), tl.load(left + request) - 1)
        row = tl.arange(0, ROWS)
        draft = tl.load(drafts + request * draft_stride + row, row < number, 0)
        tl.store(choices + request * each + row, draft, row < number)
        following = tl.load(choices + request * each + number)
        if (number < most) & (following >= 0):
            at = tl.arange(0, BLOCK)
            behind = tl.num_programs(0) * tiles
            own = request * tiles + at
            rest = tl.load(best + own, at < tiles, float("-inf"))
            whole = tl.load(best + behind + own, at < tiles, float("-inf"))
            is_rest = tl.max(rest, 0) > float("-inf")
            total = tl.where(is_rest, rest, whole)
            wheres = tl.where(is_rest, where, where + behind) + own
            columns = tl.load(wheres, at < tiles, 2147483647)
            found = tl.min(tl.where(total == tl.max(total, 0), columns, 2147483647), 0)
            tl.store(choices + request * each + number, found.to(tl.int64))
