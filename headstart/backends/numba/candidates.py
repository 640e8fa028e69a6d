"""Temperature, top-k, top-p and min-p of one row: which tokens are left of it.

Candidates are kept side by side, in the order of the vocabulary. What top-k and top-p keep is found
by halving the interval in which the last kept value lies. Shares are whole numbers, so that
no order of adding changes a sum.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import bits_of, exp, fill, float_of, in_order, largest

# Of one thread, each [tokens]: a row after penalties, bias and masks; then of each candidate its
# value after temperature (the largest is 0), exp of that, its column, its token, what it counts.
Space = namedtuple("Space", "adjusted values weights columns tokens masses")

_UNIT = np.float32(2.0**40)  # the mass of weight 1: that of a whole vocabulary stays below 2^63
_LOWEST = np.float32(np.finfo(np.float32).min)
_NOTHING = np.float32(-np.inf)
_ZERO = np.float32(0)
_EACH = np.int64(1)  # the mass of a token that is counted
_STRETCH = 64  # values that are compared together
_FEW = 16  # values of which the largest stands for all in the search for the top k


@njit()
def new_space(width):
    numbers = np.empty((3, width), np.float32)
    places = np.empty((2, width), np.int32)
    return Space(
        numbers[0], numbers[1], numbers[2], places[0], places[1], np.empty(width, np.int64)
    )


@njit()
def scale(row, temperature, space):
    """Values and weights of a row, its largest value moved to 0 first; returns that one.

    -0 becomes 0. Weights below exp(-60) are that: too little to be drawn or to count.
    """
    found = largest(row)
    highest = max(found, _LOWEST)
    values, weights = space.values, space.weights
    for i in range(row.shape[0]):
        value = (row[i] - highest) / temperature + _ZERO
        values[i] = value
        weights[i] = exp(value)
    return found


@njit()
def _key(value):
    """Whole numbers in the order of float32."""
    return np.int64(in_order(bits_of(value)))


@njit()
def _of_key(key):
    return float_of(in_order(np.int32(key)))


@njit()
def _mass_from(values, masses, least):
    total = np.int64(0)
    for i in range(values.shape[0]):
        total += masses[i] if values[i] >= least else np.int64(0)
    return total


@njit()
def _edge(values, masses, goal):
    """The largest value from which on the masses reach the goal; -inf where all do not."""
    low, high = _key(_NOTHING), _key(largest(values))
    while low < high:
        middle = (low + high + 1) // 2
        if _mass_from(values, masses, _of_key(middle)) >= goal:
            low = middle
        else:
            high = middle - 1
    return _of_key(low)


@njit(inline="always")
def _move(space, place, kept):
    space.values[kept] = space.values[place]
    space.weights[kept] = space.weights[place]
    space.columns[kept] = space.columns[place]
    space.tokens[kept] = space.tokens[place]


@njit()
def _gather(by, least, space, tokens):
    """Make candidates of those columns whose number in `by` is not less; how many they are."""
    kept, width = 0, tokens.shape[0]
    for begin in range(0, width, _STRETCH):
        end = min(begin + _STRETCH, width)
        if largest(by[begin:end]) < least:
            continue
        for i in range(begin, end):
            if by[i] >= least:
                space.values[kept] = space.values[i]
                space.weights[kept] = space.weights[i]
                space.columns[kept] = i
                space.tokens[kept] = tokens[i]
                kept += 1
    return kept


@njit()
def _cut(space, count, goal):
    """Keep the candidates before which, by value and then by column, the goal is not reached."""
    values, masses = space.values[:count], space.masses[:count]
    edge = _edge(values, masses, goal)
    before, kept = np.int64(0), 0
    for i in range(count):
        before += masses[i] if values[i] > edge else np.int64(0)
    for i in range(count):
        is_tied = values[i] == edge and before < goal
        if is_tied:
            before += masses[i]
        if is_tied or values[i] > edge:
            _move(space, i, kept)
            kept += 1
    return kept


@njit()
def keep_top(space, found, tokens, count, is_cut):
    """The `count` largest values become candidates, equal ones by lowest column.

    Of the `found` candidates, or of all columns where none were made yet.
    """
    if is_cut:
        fill(space.masses[:found], _EACH)
        return _cut(space, found, count)
    width = tokens.shape[0]
    least, groups = _NOTHING, (width + _FEW - 1) // _FEW
    if count <= groups:  # as many values are not below the last of so many groups' largest
        highest = np.empty(groups, np.float32)
        for group in range(groups):
            highest[group] = largest(space.values[group * _FEW : min((group + 1) * _FEW, width)])
        fill(space.masses[:groups], _EACH)
        least = _edge(highest, space.masses[:groups], count)
    found = _gather(space.values, least, space, tokens)
    fill(space.masses[:found], _EACH)
    return _cut(space, found, count)


@njit()
def _mass(weights):
    total = np.int64(0)
    for i in range(weights.shape[0]):
        total += np.int64(weights[i] * _UNIT)
    return total


@njit()
def _keep_share(space, count, share, total):
    for i in range(count):
        space.masses[i] = np.int64(space.weights[i] * _UNIT)
    return _cut(space, count, np.int64(np.ceil(share * total)))


@njit()
def truncate(space, tokens, row):
    """Candidates of a scaled row after top-k, top-p and min-p: how many, and whether any went.

    Where none went, values and weights are those of all columns, and columns are not set.
    """
    width, is_cut = tokens.shape[0], False
    count, has_top_k, has_top_p = width, 0 < row.top_k < width, row.top_p < 1
    if has_top_k:
        count = keep_top(space, width, tokens, row.top_k, is_cut)
        if has_top_p:
            count = _keep_share(space, count, row.top_p, _mass(space.weights[:count]))
    elif has_top_p:
        # All that weigh less than this are together less than what is left over.
        total = _mass(space.weights[:width])
        least = np.float32((1 - row.top_p) * total / (2 * width) / _UNIT)
        count = _gather(space.weights, least, space, tokens)
        count = _keep_share(space, count, row.top_p, total)
    elif row.floor > _NOTHING:
        return _gather(space.values, row.floor, space, tokens), True
    else:
        return width, is_cut
    kept = 0
    for i in range(count):
        if space.values[i] >= row.floor:
            _move(space, i, kept)
            kept += 1
    return kept, True
