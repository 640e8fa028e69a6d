"""The choice among processed logits: top-k, top-p, min-p and noise, on a GPU.

Tokens are cut into tiles, as `adjusting.py` leaves them. `_draw` adds the noise, finds each tile's
best sum, and weighs the tile. `_finish` takes the best sum of a row. What top-k and top-p keep is a
beginning of the ranking, so if that token is kept it is the choice; else the search goes on among
the tokens ranked before it, which takes one turn for most rows. Weights are integers, whose sums do
not depend on any order: a row's choice is a function of that row alone.

B requests, M rows (equally many of each request), N columns (tokens, or a draft vocabulary's), V
tokens, T tiles, S parts of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.adjusting import (
    FORBIDS,
    TILE,
    Adjusted,
    Settings,
    id_stride,
)
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.noise import gumbel_of, noise_bits, row_keys
from headstart.backends.cuda.kernels.ranking import (
    FLOOR,
    TOP_K,
    TOP_P,
    fixed,
    kept_of_row,
    weight_before,
)

STEP = 4096  # tokens that one program of a row looks at together


def draw(adjusted: Adjusted, settings: Settings) -> Tensor:
    """Columns [M] int64 of the tokens; -1 where no token is allowed."""
    rows, columns = adjusted.values.shape
    each, tiles = rows // settings.count, adjusted.peaks.shape[1]
    device, ids = adjusted.values.device, adjusted.token_ids
    best = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    where = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    weights = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    chosen = torch.empty(rows, dtype=torch.int64, device=device)
    shape = {
        "HAS_IDS": ids is not None, "TILE": TILE, "TILES": triton.next_power_of_2(tiles),
    }  # fmt: skip
    given = settings.seeds, adjusted.positions, where if ids is None else ids
    asked = settings.numbers, settings.counts, settings.numbers.stride(0), each, id_stride(ids)
    _draw[(tiles, rows)](
        adjusted.values, adjusted.peaks, *given, *asked, best, where, weights, columns, tiles,
        **shape, num_warps=4,
    )  # fmt: skip
    _finish[(rows,)](
        adjusted.values, adjusted.peaks, *given, *asked, best, where, weights, chosen, columns,
        tiles, **shape, STEP=min(STEP, triton.next_power_of_2(columns)), num_warps=8,
    )  # fmt: skip
    return chosen


@jit(do_not_specialize=["stride", "each", "id_stride"])
def _draw(values, peaks, seeds, positions, ids, numbers, counts, stride, each, id_stride, best,
          where, weights, columns, tiles, HAS_IDS: tl.constexpr, TILE: tl.constexpr,
          TILES: tl.constexpr):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = row // each
    column = tile * TILE + tl.arange(0, TILE)
    is_column = column < columns
    value = tl.load(values + row * columns + column, is_column, float("-inf")).to(tl.float32)
    asked = numbers + request
    inv_temp = tl.load(asked)
    at = row * tiles + tile
    if inv_temp > 0:
        all_tiles = tl.arange(0, TILES)
        all_peaks = tl.load(peaks + row * tiles + all_tiles, all_tiles < tiles, float("-inf"))
        largest = tl.maximum(tl.max(all_peaks, 0), -3.4028234663852886e38)
        scaled = (value - largest) * inv_temp
        top_p, top_k = tl.load(asked + TOP_P * stride), tl.load(counts + TOP_K * stride + request)
        if (top_p < 1) | (top_k > 0):
            tl.store(weights + at, tl.sum(fixed(scaled), 0))
        token = column
        if HAS_IDS:
            token = tl.load(ids + row * id_stride + column, is_column, 0).to(tl.int32)
        first, second = row_keys(tl.load(seeds + request), tl.load(positions + row))
        value = scaled + gumbel_of(noise_bits(token, first, second))
        is_left = is_column & (scaled >= tl.load(asked + FLOOR * stride))
        value = tl.where(is_left, value, float("-inf"))
    top = tl.max(value, 0)
    tl.store(best + at, top)
    tl.store(where + at, tl.min(tl.where(value == top, column, 2147483647), 0))


@jit(do_not_specialize=["stride", "each", "id_stride"])
def _finish(values, peaks, seeds, positions, ids, numbers, counts, stride, each, id_stride, best,
            where, weights, chosen, columns, tiles, HAS_IDS: tl.constexpr, TILE: tl.constexpr,
            TILES: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // each
    tile = tl.arange(0, TILES)
    is_tile = tile < tiles
    bests = tl.load(best + row * tiles + tile, is_tile, float("-inf"))
    top = tl.max(bests, 0)
    wheres = tl.load(where + row * tiles + tile, is_tile, 2147483647)
    column = tl.min(tl.where(bests == top, wheres, 2147483647), 0)
    # Nothing is the best of logits that are no numbers; some token must be chosen all the same.
    column = tl.where(column < columns, column, 0)
    asked = numbers + request
    inv_temp, top_p = tl.load(asked), tl.load(asked + TOP_P * stride)
    top_k = tl.load(counts + TOP_K * stride + request)
    if (inv_temp > 0) & ((top_p < 1) | (top_k > 0)) & (top > float("-inf")):
        own = values + row * columns
        all_peaks = tl.load(peaks + row * tiles + tile, is_tile, float("-inf"))
        largest = tl.max(all_peaks, 0)
        most = tl.where(top_k > 0, top_k, 2147483647)
        value = tl.load(own + column).to(tl.float32)
        count, mass = weight_before(own, value, column, largest, inv_temp, columns, STEP)
        limit = mass.to(tl.float64) + float("inf")
        if (count > 0) & (top_p < 1):  # the token that ranks first is kept in any case
            total = tl.sum(tl.load(weights + row * tiles + tile, is_tile, 0), 0)
            if top_k > 0:
                _, total, _, _ = kept_of_row(
                    own, all_peaks, top_k, limit, largest, inv_temp, columns, TILE, TILES, STEP
                )
            limit = total.to(tl.float64) * top_p
        while (count > 0) & ((count >= most) | (mass.to(tl.float64) >= limit)):
            column = _best_before(
                own, value, column, largest, inv_temp, tl.load(asked + FLOOR * stride),
                tl.load(seeds + request), tl.load(positions + row), ids + row * id_stride, columns,
                HAS_IDS, STEP,
            )  # fmt: skip
            value = tl.load(own + column).to(tl.float32)
            count, mass = weight_before(own, value, column, largest, inv_temp, columns, STEP)
    forbids = (tl.load(counts + request) & FORBIDS) != 0
    tl.store(chosen + row, tl.where((top == float("-inf")) & forbids, -1, column).to(tl.int64))


@jit
def _best_before(own, value, column, largest, inv_temp, floor, seed, position, ids, columns,
                 HAS_IDS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The column with the best sum of value and noise among those ranked before `column`."""
    first, second = row_keys(seed, position)
    best = tl.full((STEP,), float("-inf"), dtype=tl.float32)
    where = tl.full((STEP,), 2147483647, dtype=tl.int32)
    for start in range(0, columns, STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(own + at, at < columns, float("-inf")).to(tl.float32)
        token = at
        if HAS_IDS:
            token = tl.load(ids + at, at < columns, 0).to(tl.int32)
        scaled = (x - largest) * inv_temp
        total = scaled + gumbel_of(noise_bits(token, first, second))
        is_before = (x > value) | ((x == value) & (at < column))
        total = tl.where(is_before & (scaled >= floor), total, float("-inf"))
        where = tl.where(total > best, at, where)
        best = tl.maximum(total, best)
    found = tl.min(tl.where(best == tl.max(best, 0), where, 2147483647), 0)
    return tl.where(found < columns, found, 0)
