"""Temperature, top-k, top-p and min-p of one row: which tokens are left of it.

Candidates are kept side by side, in the order of the vocabulary. What top-k and top-p keep is found
by halving the interval in which the last kept value lies. Shares are whole numbers, so that
no order of adding changes a sum. Only top-p and rows that nothing is cut from need exp of every
value; elsewhere candidates are found among the row's own numbers, whose order temperature keeps.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import bits_of, copy, exp, fill, float_of, largest, sortable_bits

# Of one thread, each [tokens]: a row after penalties, bias and masks; then of each candidate its
# value after temperature (the largest is 0), exp of that, its column, its token, what it counts.
RowScratch = namedtuple("RowScratch", "adjusted values weights columns tokens masses")

_UNIT = np.float32(2.0**40)  # the mass of weight 1: that of a whole vocabulary stays below 2^63
_LOWEST = np.float32(np.finfo(np.float32).min)
_NOTHING = np.float32(-np.inf)
_ZERO = np.float32(0)
_EACH = np.int64(1)  # the mass of a token that is counted
_VECTOR_CHUNK = 64  # values that are compared together
_GROUP_SIZE = 16  # columns, of which a search for candidates looks at the largest first


@njit()
def new_scratch(width):
    numbers = np.empty((3, width), np.float32)
    places = np.empty((2, width), np.int32)
    return RowScratch(
        numbers[0], numbers[1], numbers[2], places[0], places[1], np.empty(width, np.int64)
    )


@njit(inline="always")
def scaled(number, highest, temperature):
    """A value after temperature, the highest moved to 0 first; -0 becomes 0."""
    return (number - highest) / temperature + _ZERO


@njit()
def write_weights(row, temperature, scratch):
    """Weights of all columns; returns the row's highest number, finite where none is.

    Weights below exp(-60) are that: too little to be drawn or to count.
    """
    highest, weights = max(largest(row), _LOWEST), scratch.weights
    for i in range(row.shape[0]):
        weights[i] = exp(scaled(row[i], highest, temperature))
    return highest


@njit()
def _scale(row, temperature, scratch):
    """Values and weights of all columns; whether any token is allowed."""
    highest, values, weights = max(largest(row), _LOWEST), scratch.values, scratch.weights
    for i in range(row.shape[0]):
        values[i] = scaled(row[i], highest, temperature)
        weights[i] = exp(values[i])
    return highest > _LOWEST


@njit()
def _key(value):
    """Whole numbers in the order of float32."""
    return np.int64(sortable_bits(bits_of(value)))


@njit()
def _of_key(key):
    return float_of(sortable_bits(np.int32(key)))


@njit()
def _mass_from(values, masses, least):
    total = np.int64(0)
    for i in range(values.shape[0]):
        total += masses[i] if values[i] >= least else np.int64(0)
    return total


@njit()
def _threshold(values, masses, goal):
    """The largest value from which on masses reach the goal; -inf where all together do not."""
    low, high = _key(_NOTHING), _key(largest(values))
    while low < high:
        middle = (low + high + 1) >> 1
        if _mass_from(values, masses, _of_key(middle)) >= goal:
            low = middle
        else:
            high = middle - 1
    return _of_key(low)


@njit()
def _num_from(values, least):
    count = np.int32(0)
    for i in range(values.shape[0]):
        count += np.int32(values[i] >= least)
    return count


@njit()
def _kth_largest(values, count):
    """The `count`-th largest of at least as many values."""
    low, high = _key(_NOTHING), _key(largest(values))
    while low < high:
        middle = (low + high + 1) >> 1
        if _num_from(values, _of_key(middle)) >= count:
            low = middle
        else:
            high = middle - 1
    return _of_key(low)


@njit()
def _lowest_logit_for(least, highest, temperature):
    """The lowest logit that is not below `least` after temperature."""
    low, high = _key(_NOTHING), _key(highest)
    while low < high:
        middle = (low + high) >> 1
        if scaled(_of_key(middle), highest, temperature) >= least:
            high = middle
        else:
            low = middle + 1
    return _of_key(low)


@njit(inline="always")
def _move(scratch, place, kept):
    scratch.values[kept] = scratch.values[place]
    scratch.weights[kept] = scratch.weights[place]
    scratch.columns[kept] = scratch.columns[place]
    scratch.tokens[kept] = scratch.tokens[place]


@njit()
def _num_groups(width):
    return (width + _GROUP_SIZE - 1) // _GROUP_SIZE


@njit()
def _largest_of_groups(row, out):
    """out [groups]: of columns g, g + groups, g + 2 * groups, ... the largest number."""
    width, groups = row.shape[0], out.shape[0]
    copy(row[:groups], out)
    for begin in range(groups, width, groups):
        part = row[begin : min(begin + groups, width)]
        for i in range(part.shape[0]):
            out[i] = part[i] if part[i] > out[i] else out[i]


@njit()
def _gather(by, least, best, scratch):
    """Columns whose number in `by` is not less, in order; how many. best: of groups of `by`."""
    width, groups, listed, kept = by.shape[0], best.shape[0], 0, 0
    for begin in range(0, groups, _VECTOR_CHUNK):
        end = min(begin + _VECTOR_CHUNK, groups)
        if largest(best[begin:end]) < least:
            continue
        for group in range(begin, end):
            if best[group] >= least:
                scratch.tokens[listed] = group
                listed += 1
    for begin in range(0, width, groups):
        for i in range(listed):
            column = begin + scratch.tokens[i]
            if column < width and by[column] >= least:
                scratch.columns[kept] = column
                kept += 1
    return kept


@njit()
def _take(row, highest, temperature, tokens, count, scratch):
    """Values, weights and tokens of the columns that were gathered."""
    for i in range(count):
        column = scratch.columns[i]
        scratch.values[i] = scaled(row[column], highest, temperature)
        scratch.tokens[i] = tokens[column]
    for i in range(count):
        scratch.weights[i] = exp(scratch.values[i])


@njit()
def _cut(scratch, count, goal):
    """Keep the candidates before which, by value and then by column, the goal is not reached."""
    values, masses = scratch.values[:count], scratch.masses[:count]
    threshold = _threshold(values, masses, goal)
    before, kept = np.int64(0), 0
    for i in range(count):
        before += masses[i] if values[i] > threshold else np.int64(0)
    for i in range(count):
        is_tied = values[i] == threshold and before < goal
        if is_tied:
            before += masses[i]
        if is_tied or values[i] > threshold:
            _move(scratch, i, kept)
            kept += 1
    return kept


@njit()
def keep_top_of(scratch, found, count):
    """Of so many candidates the `count` with the largest values, equal ones by lowest column."""
    if found <= count:
        return found
    fill(scratch.masses[:found], _EACH)
    return _cut(scratch, found, count)


@njit()
def keep_top(row, temperature, tokens, count, scratch):
    """The same of all columns; none where no token is allowed."""
    best = scratch.values[: _num_groups(row.shape[0])]
    _largest_of_groups(row, best)
    highest, least = largest(best), _LOWEST  # what is not allowed is no candidate
    if highest == _NOTHING:
        return 0
    if count <= best.shape[0]:  # as many numbers are not below the last of so many groups' largest
        threshold = scaled(_kth_largest(best, count), highest, temperature)
        least = max(least, _lowest_logit_for(threshold, highest, temperature))
    found = _gather(row, least, best, scratch)
    _take(row, highest, temperature, tokens, found, scratch)
    return keep_top_of(scratch, found, count)


@njit()
def _mass(weights):
    total = np.int64(0)
    for i in range(weights.shape[0]):
        total += np.int64(weights[i] * _UNIT)
    return total


@njit()
def _keep_share(scratch, count, share, total):
    for i in range(count):
        scratch.masses[i] = np.int64(scratch.weights[i] * _UNIT)
    return _cut(scratch, count, np.int64(np.ceil(share * total)))


@njit()
def _keep_top_p(row, temperature, tokens, share, scratch):
    width, weights = row.shape[0], scratch.weights
    highest = write_weights(row, temperature, scratch)
    if highest == _LOWEST:
        return 0
    # All that weigh less than this are together less than what is left over.
    total = _mass(weights[:width])
    least = np.float32((1 - share) * total / (2 * width) / _UNIT)
    best = scratch.values[: _num_groups(width)]
    _largest_of_groups(weights[:width], best)
    count = _gather(weights[:width], least, best, scratch)
    _take(row, highest, temperature, tokens, count, scratch)
    return _keep_share(scratch, count, share, total)


@njit()
def _keep_min_p(row, temperature, tokens, floor, scratch):
    best = scratch.values[: _num_groups(row.shape[0])]
    _largest_of_groups(row, best)
    highest = largest(best)
    if highest == _NOTHING:
        return 0
    count = _gather(row, _lowest_logit_for(floor, highest, temperature), best, scratch)
    _take(row, highest, temperature, tokens, count, scratch)
    return count


@njit()
def truncate(row, tokens, params, scratch):
    """Candidates of a row after temperature, top-k, top-p and min-p: how many, whether any went.

    None where no token is allowed. Where none went, values and weights are those of all columns,
    and columns are not set.
    """
    width, temperature = tokens.shape[0], params.temperature
    if 0 < params.top_k < width:
        count = keep_top(row, temperature, tokens, params.top_k, scratch)
        if params.top_p < 1:
            count = _keep_share(scratch, count, params.top_p, _mass(scratch.weights[:count]))
    elif params.top_p < 1:
        count = _keep_top_p(row, temperature, tokens, params.top_p, scratch)
    elif params.floor > _NOTHING:
        return _keep_min_p(row, temperature, tokens, params.floor, scratch), True
    else:
        return (width if _scale(row, temperature, scratch) else 0), False
    kept = 0
    for i in range(count):
        if scratch.values[i] >= params.floor:
            _move(scratch, i, kept)
            kept += 1
    return kept, True
