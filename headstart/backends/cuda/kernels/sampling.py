"""The choice among processed logits: all that `sampling/processors.py` does, then noise, on a GPU.

Tokens are cut into tiles. `_adjust` applies penalties, biases and masks, and finds each tile's
largest value (its peak). `_draw` adds the noise, finds each tile's best sum, and weighs the tile.
`_finish` takes the best sum of a row. What top-k and top-p keep is a beginning of the ranking, so
if that token is kept it is the choice; else the search goes on among the tokens ranked before it,
which takes one turn for most rows. Weights are integers, whose sums do not depend on any order: a
row's choice is a function of that row alone.

B requests, M rows (equally many of each request), N columns (tokens, or a draft vocabulary's), V
tokens, T tiles, S parts of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.noise import gumbel_of, noise_bits, row_keys
from headstart.backends.cuda.kernels.ranking import (
    END_AFTER,
    FLOOR,
    FREQUENCY,
    PRESENCE,
    REPETITION,
    TOP_K,
    TOP_P,
    fixed,
    kept_of_row,
    weight_before,
)

TILE = 1024
STEP = 4096  # tokens that one program of a row looks at together

# The first rows of `Settings.numbers` and `Settings.counts`; ranking.py has the others.
INV_TEMP, USES = 0, 0
NUM_NUMBERS, NUM_COUNTS = 6, 5
# Bits of USES.
PENALTIES, BIAS, ENDS, MASK, REJECTS = 1, 2, 4, 8, 16
# A word of `Settings.history`: whether the prompt has the token, whether it ends an answer, and
# from bit 2 on how often the output has it.
IN_PROMPT, IS_END, ONE_OUTPUT = 1, 2, 4

_PENALTIES, _BIAS, _ENDS, _MASK = (tl.constexpr(bit) for bit in (PENALTIES, BIAS, ENDS, MASK))


@dataclass(frozen=True)
class Settings:
    """What requests ask of the choice, on the device."""

    numbers: Tensor  # [NUM_NUMBERS, B] fp32
    counts: Tensor  # [NUM_COUNTS, B] int32
    seeds: Tensor  # [B] int64
    history: Tensor  # [B, V] int32, of requests with penalties or min_tokens
    bias: Tensor  # [B, V] fp32 with -inf for what is forbidden, of requests that have one

    @property
    def count(self) -> int:
        return self.seeds.shape[0]

    @property
    def inv_temps(self) -> Tensor:
        return self.numbers[INV_TEMP]

    def first(self, count: int) -> Settings:
        """Of the first requests."""
        return Settings(
            self.numbers[:, :count], self.counts[:, :count], self.seeds[:count],
            self.history[:count], self.bias[:count],
        )  # fmt: skip


@dataclass(frozen=True)
class Adjusted:
    """Logits after penalties, biases and masks."""

    values: Tensor  # [M, N] fp32; where nothing is processed they may be in another type
    peaks: Tensor  # [M, T]: the largest value of each tile
    positions: Tensor  # [M] of the tokens to be chosen
    token_ids: Tensor | None  # [N] of a draft vocabulary, or [M, N]

    def tokens_at(self, columns: Tensor) -> Tensor:
        """Ids [M] of one column of each row."""
        if self.token_ids is None:
            return columns
        if self.token_ids.dim() == 1:
            return self.token_ids[columns]
        return self.token_ids.gather(1, columns[:, None]).squeeze(1)


def adjust(
    logits: Tensor, settings: Settings, positions: Tensor, *, drafts: Tensor | None = None,
    token_ids: Tensor | None = None, masks: Tensor | None = None, penalises: bool = True,
    processes: bool = True, copies: bool = True,
) -> Adjusted:  # fmt: skip
    """logits [S, M, N], whose sum over S counts.

    drafts [B, each - 1]: row r of a request comes after r of them, which penalties count. masks
    [M, words] int32: bits of tokens that a grammar allows, for rows of requests that have one.
    token_ids [N], or [M, N] where rows have columns of their own. Without `processes` logits stay
    as they are; then without `copies`, too, where they lie.
    """
    splits, rows, columns = logits.shape
    each = rows // settings.count
    tiles = triton.cdiv(columns, TILE)
    stores = copies or processes or splits > 1
    values = logits[0]
    if stores:
        values = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    none = settings.counts
    _adjust[(tiles, rows)](
        logits, none if drafts is None else drafts, positions,
        none if token_ids is None else token_ids, settings.numbers, settings.counts,
        settings.history, settings.bias, none if masks is None else masks, values, peaks,
        settings.numbers.stride(0), each, rows, columns, settings.bias.shape[1],
        0 if masks is None else masks.shape[1], tiles, 0 if drafts is None else drafts.stride(0),
        id_stride(token_ids),
        SPLITS=splits, HAS_IDS=token_ids is not None, HAS_MASKS=masks is not None,
        PENALISES=penalises, PROCESSES=processes, STORES=stores, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return Adjusted(values, peaks, positions, token_ids)


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


def id_stride(token_ids: Tensor | None) -> int:
    """From the ids of a row's columns to the next row's; 0 where all have the same."""
    return 0 if token_ids is None or token_ids.dim() == 1 else token_ids.stride(0)


def remember(settings: Settings, emitted: Tensor) -> None:
    """Count what a round emitted, [B, 1 + R]: how many tokens, then the tokens."""
    requests, width = emitted.shape
    _remember[(requests,)](
        settings.history, settings.counts, emitted, settings.history.shape[1], width,
        emitted.stride(0), BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize=["stride", "each", "rows", "words", "draft_stride", "id_stride"])
def _adjust(logits, drafts, positions, ids, numbers, counts, history, bias, masks, values, peaks,
            stride, each, rows, columns, vocab, words, tiles, draft_stride, id_stride,
            SPLITS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASKS: tl.constexpr,
            PENALISES: tl.constexpr, PROCESSES: tl.constexpr, STORES: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, depth = row // each, row % each
    column = tile * TILE + tl.arange(0, TILE)
    is_column = column < columns
    value = tl.load(logits + row * columns + column, is_column, float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        part = logits + (split * rows + row) * columns + column
        value += tl.load(part, is_column, 0.0).to(tl.float32)
    token = column
    if HAS_IDS:
        token = tl.load(ids + row * id_stride + column, is_column, 0).to(tl.int32)
    uses = tl.load(counts + request) * PROCESSES
    asked = numbers + request
    if PENALISES:  # noqa: SIM102 (this is decided while compiling, the other at run time)
        if uses & _PENALTIES:
            word = tl.load(history + request * vocab + token, is_column, 0)
            count = word >> 2
            for draft in range(depth):
                count += (token == tl.load(drafts + request * draft_stride + draft)).to(tl.int32)
            is_seen = (count > 0) | ((word & 1) != 0)
            penalty = tl.load(asked + REPETITION * stride)
            value = tl.where(is_seen, tl.where(value > 0, value / penalty, value * penalty), value)
            presence = tl.load(asked + PRESENCE * stride)
            amount = tl.load(asked + FREQUENCY * stride) * count.to(tl.float32) + presence
            value = tl.where(count > 0, value - amount, value)
    if uses & _BIAS:
        value += tl.load(bias + request * vocab + token, is_column, 0.0)
    if uses & _ENDS:
        word = tl.load(history + request * vocab + token, is_column, 0)
        is_early = tl.load(positions + row) < tl.load(counts + END_AFTER * stride + request)
        value = tl.where(is_early & ((word & 2) != 0), float("-inf"), value)
    if HAS_MASKS:  # noqa: SIM102
        if uses & _MASK:
            bits = tl.load(masks + row * words + (token >> 5), is_column, 0)
            value = tl.where(((bits >> (token & 31)) & 1) != 0, value, float("-inf"))
    if STORES:
        tl.store(values + row * columns + column, value, is_column)
    tl.store(peaks + row * tiles + tile, tl.max(value, 0))


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
    forbids = (tl.load(counts + request) & (_BIAS | _ENDS | _MASK)) != 0
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


@jit(do_not_specialize=["width", "stride"])
def _remember(history, counts, emitted, vocab, width, stride, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(counts + request) & _PENALTIES:
        at = tl.arange(0, BLOCK)
        count = tl.load(emitted + request * stride)
        token = tl.load(emitted + request * stride + 1 + at, at < width - 1, -1)
        is_new = (at < count) & (token >= 0)
        tl.atomic_add(history + request * vocab + token, 4, is_new)
