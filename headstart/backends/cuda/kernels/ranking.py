"""A row of values by rank: how many, and how much of the distribution, come before a token.

Larger values come first, equal ones by lowest column. Shares of the distribution are integers in
units of 2**-40 of the largest one, so that their sums do not depend on the order of additions.
"""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit

NONE = tl.constexpr(0x7FFFFFFF)  # a column after all others
UNIT = tl.constexpr(2.0**40)  # of weights
# Rows of `Settings.numbers` and `Settings.counts`, in adjusting.py.
TOP_P, FLOOR, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(row) for row in range(1, 6))
TOP_K, END_AFTER, NUM_LOGPROBS, IS_PROCESSED = (tl.constexpr(row) for row in range(1, 5))
_MOST_LOOKED_UP = tl.constexpr(64)


@jit
def fixed(scaled):
    """exp(scaled) in units; scaled is at most 0. What is no number weighs nothing."""
    return tl.where(scaled <= 0, tl.exp(scaled) * UNIT, 0.0).to(tl.int64)


@jit
def weight_before(own, value, column, largest, inv_temp, columns, STEP: tl.constexpr):
    """How many tokens of a row rank before (value, column), and their weight."""
    count = tl.zeros((STEP,), dtype=tl.int32)
    weight = tl.zeros((STEP,), dtype=tl.int64)
    for start in range(0, columns, STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(own + at, at < columns, float("-inf")).to(tl.float32)
        is_before = (x > value) | ((x == value) & (at < column))
        count += is_before.to(tl.int32)
        weight += tl.where(is_before, fixed((x - largest) * inv_temp), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@jit
def next_ranked(own, peaks, value, column, columns, TILE: tl.constexpr, TILES: tl.constexpr):
    """The token that ranks first after (value, column), and the peaks without it.

    peaks [TILES]: of each tile the largest value that ranks after (value, column).
    """
    tile = tl.arange(0, TILES)
    top = tl.max(peaks, 0)
    chosen = tl.min(tl.where(peaks == top, tile, TILES - 1), 0)
    at = chosen * TILE + tl.arange(0, TILE)
    x = tl.load(own + at, at < columns, float("-inf")).to(tl.float32)
    is_left = (x < value) | ((x == value) & (at > column))
    found = tl.min(tl.where(is_left & (x == top), at, NONE), 0)
    is_left = (x < top) | ((x == top) & (at > found))
    peak = tl.max(tl.where(is_left, x, float("-inf")), 0)
    return top, found, tl.where(tile == chosen, peak, peaks)


@jit
def kept_of_row(own, peaks, most, limit, largest, inv_temp, columns, TILE: tl.constexpr,
                TILES: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """How many tokens are kept, their weight, and the value and column of the last, where one is
    kept if fewer than `most` tokens and less weight than `limit` (fp64) rank before it.

    peaks [TILES] of all tiles. Few tokens are looked up one after another; of more the lowest value
    is searched for.
    """
    count = most * 0
    weight = count.to(tl.int64)
    value, column = largest * 0 + float("inf"), most * 0 - 1
    while (count < most) & (count < _MOST_LOOKED_UP) & (weight.to(tl.float64) < limit):
        value, column, peaks = next_ranked(own, peaks, value, column, columns, TILE, TILES)
        count += 1
        weight += fixed((value - largest) * inv_temp)
    if (count < most) & (weight.to(tl.float64) < limit):
        count, weight, value, column = _search_kept(
            own, most, limit, largest, inv_temp, columns, STEP
        )
    return count, weight, value, column


@jit
def _search_kept(own, most, limit, largest, inv_temp, columns, STEP: tl.constexpr):
    """The same by bisection over the bits of the lowest value that is kept."""
    high = _key(largest).to(tl.int64)
    low = high * 0 - 2139095041  # of -inf
    while high - low > 1:  # values above the key `high` are kept, at `low` they are not
        middle = (low + high) >> 1
        count, weight = weight_before(
            own, _value(middle.to(tl.int32)), -1, largest, inv_temp, columns, STEP
        )
        is_kept = (count < most) & (weight.to(tl.float64) < limit)
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle)
    lowest = _value(high.to(tl.int32))
    above, weight = weight_before(own, lowest, -1, largest, inv_temp, columns, STEP)
    through, _ = weight_before(own, lowest, NONE, largest, inv_temp, columns, STEP)
    equal = through - above
    # Where all are kept no token has the lowest value, which may be too low to be scaled.
    each = fixed(tl.maximum(lowest - largest, -1e30) * inv_temp)
    room = limit - weight.to(tl.float64)
    fitting = tl.ceil(tl.minimum(room / tl.maximum(each, 1).to(tl.float64), 1e9)).to(tl.int32)
    kept = tl.minimum(tl.minimum(equal, most - above), fitting)
    low_column = kept * 0 - 1
    high_column = low_column + columns
    if kept < equal:  # of equal values those with the lowest columns are kept
        while high_column - low_column > 1:
            column = (low_column + high_column) >> 1
            count, _ = weight_before(own, lowest, column + 1, largest, inv_temp, columns, STEP)
            is_enough = count >= above + kept
            high_column = tl.where(is_enough, column, high_column)
            low_column = tl.where(is_enough, low_column, column)
    return above + kept, weight + kept.to(tl.int64) * each, lowest, high_column


@jit
def distribution(own, peaks, numbers, counts, stride, request, is_drawn, columns,
                 TILE: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """What a row's choice is drawn from: tokens kept, their weight, value and column of the last,
    the largest value, and the factor of values.

    At temperature 0 all weight is on one token where `is_drawn`; else nothing is cut or scaled.
    """
    asked = numbers + request
    inv_temp, top_p = tl.load(asked), tl.load(asked + TOP_P * stride)
    floor, top_k = tl.load(asked + FLOOR * stride), tl.load(counts + TOP_K * stride + request)
    is_sampled = inv_temp > 0
    scale = tl.where(is_sampled, inv_temp, 1.0)
    largest = tl.max(peaks, 0)
    most = tl.where((top_k > 0) & is_sampled, tl.minimum(top_k, columns), columns)
    most = tl.where(is_sampled | (is_drawn == 0), most, 1)
    if most < columns:
        unlimited = scale.to(tl.float64) + float("inf")
        kept, weight, value, column = kept_of_row(
            own, peaks, most, unlimited, largest, scale, columns, TILE, TILES, STEP
        )
    else:
        kept, weight = _kept_above(own, float("-inf"), largest, scale, columns, STEP)
        value, column = largest * 0 - float("inf"), most
    if is_sampled & (top_p < 1):
        limit = weight.to(tl.float64) * top_p
        kept, weight, value, column = kept_of_row(
            own, peaks, kept, limit, largest, scale, columns, TILE, TILES, STEP
        )
    if is_sampled & (floor > float("-inf")):
        above, of_them = _kept_above(own, floor, largest, scale, columns, STEP)
        if above < kept:
            kept, weight, value, column = above, of_them, floor / scale + largest, columns
    return kept, weight, value, column, largest, scale


@jit
def _kept_above(own, floor, largest, scale, columns, STEP: tl.constexpr):
    """How many tokens min-p keeps, and their weight: those whose scaled value reaches the floor."""
    count = tl.zeros((STEP,), dtype=tl.int32)
    weight = tl.zeros((STEP,), dtype=tl.int64)
    for start in range(0, columns, STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(own + at, at < columns, float("-inf")).to(tl.float32)
        scaled = (x - largest) * scale
        count += ((scaled >= floor) & (at < columns)).to(tl.int32)
        weight += tl.where(scaled >= floor, fixed(scaled), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@jit
def _key(value):
    """An integer that orders as the number does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
