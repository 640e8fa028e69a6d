"""Log-probabilities of emitted tokens, and the most likely ones beside them, on a GPU.

Raw ones are of the logits as they are; processed ones of what the choice was made from.

M rows (equally many of each of B requests), N tokens, T tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.adjusting import TILE, Adjusted, Settings
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.ranking import (
    IS_PROCESSED,
    NUM_LOGPROBS,
    UNIT,
    distribution,
    fixed,
    next_ranked,
)
from headstart.backends.cuda.kernels.sampling import STEP

MAX_LOGPROBS = 20  # alternatives of a token


def logprobs_of(
    raw: Adjusted, adjusted: Adjusted, settings: Settings, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Of tokens [M]: values [M, 1 + MAX_LOGPROBS], the token's own first, and ids of the others.

    `raw` and `adjusted` have one type, and are the same where nothing is processed. Rows of
    requests that ask for none are left as they are.
    """
    rows, columns = raw.values.shape
    each, tiles = rows // settings.count, raw.peaks.shape[1]
    device = raw.values.device
    weights = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    values = torch.empty(rows, 1 + MAX_LOGPROBS, dtype=torch.float32, device=device)
    ids = torch.empty(rows, MAX_LOGPROBS, dtype=torch.int32, device=device)
    shape = {"TILE": TILE, "TILES": triton.next_power_of_2(tiles)}
    given = raw.values, raw.peaks, adjusted.values, adjusted.peaks
    asked = settings.numbers, settings.counts, settings.numbers.stride(0), each
    _weigh[(tiles, rows)](*given, *asked, weights, columns, tiles, **shape, num_warps=4)
    _rank[(rows,)](
        *given, *asked, weights, tokens, values, ids, columns, tiles, **shape,
        STEP=min(STEP, triton.next_power_of_2(columns)), MOST=MAX_LOGPROBS, num_warps=8,
    )  # fmt: skip
    return values, ids


@jit(do_not_specialize=["stride", "each"])
def _weigh(raw, raw_peaks, adjusted, adjusted_peaks, numbers, counts, stride, each, weights,
           columns, tiles, TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = row // each
    if tl.load(counts + NUM_LOGPROBS * stride + request) >= 0:
        is_processed = tl.load(counts + IS_PROCESSED * stride + request) > 0
        inv_temp = tl.load(numbers + request)
        scale = tl.where(is_processed & (inv_temp > 0), inv_temp, 1.0)
        peaks = tl.where(is_processed, adjusted_peaks, raw_peaks)
        at = tl.arange(0, TILES)
        largest = tl.max(tl.load(peaks + row * tiles + at, at < tiles, float("-inf")), 0)
        column = tile * TILE + tl.arange(0, TILE)
        own = tl.where(is_processed, adjusted, raw) + row * columns
        value = tl.load(own + column, column < columns, float("-inf")).to(tl.float32)
        tl.store(weights + row * tiles + tile, tl.sum(fixed((value - largest) * scale), 0))


@jit(do_not_specialize=["stride", "each"])
def _rank(raw, raw_peaks, adjusted, adjusted_peaks, numbers, counts, stride, each, weights,
          tokens, values, ids, columns, tiles, TILE: tl.constexpr, TILES: tl.constexpr,
          STEP: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // each
    top = tl.load(counts + NUM_LOGPROBS * stride + request)
    if top >= 0:
        is_processed = tl.load(counts + IS_PROCESSED * stride + request) > 0
        at = tl.arange(0, TILES)
        all_peaks = tl.where(is_processed, adjusted_peaks, raw_peaks) + row * tiles + at
        peaks = tl.load(all_peaks, at < tiles, float("-inf"))
        largest = tl.max(peaks, 0)
        scale = largest * 0 + 1.0
        own = tl.where(is_processed, adjusted, raw) + row * columns
        mass = tl.sum(tl.load(weights + row * tiles + at, at < tiles, 0), 0)
        kept = top * 0 + columns
        if is_processed & (tl.load(numbers + request) > 0):
            kept, mass, _, _, largest, scale = distribution(
                own, peaks, numbers, counts, stride, request, 0, columns, TILE, TILES, STEP
            )
        norm = tl.log(mass.to(tl.float64) / UNIT).to(tl.float32)
        token = tl.maximum(tl.load(tokens + row), 0)
        chosen = tl.load(own + token).to(tl.float32)
        tl.store(values + row * (1 + MOST), (chosen - largest) * scale - norm)
        value, column = largest * 0 + float("inf"), top * 0 - 1
        for number in range(tl.minimum(top, columns)):
            value, column, peaks = next_ranked(own, peaks, value, column, columns, TILE, TILES)
            found = tl.where(number < kept, (value - largest) * scale - norm, float("-inf"))
            tl.store(values + row * (1 + MOST) + 1 + number, found)
            tl.store(ids + row * MOST + number, column)
