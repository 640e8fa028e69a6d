"""The noise of `sampling/noise.py`, and the draw of a token with as little of it as decides.

Integers are those of the reference to the bit; logarithms are the C library's, equal up to
rounding. A token wins where value + noise is largest, and noise is large where its number u is
small: only tokens with u <= exp(value - best sum so far) can still win, which vectors test without
a logarithm.
"""

from __future__ import annotations

import math

import numpy as np

from headstart.backends.numba.compiler import njit
from headstart.backends.numba.rows import largest
from headstart.sampling import noise as reference
from headstart.sampling.params import GAMMA

_GAMMA, _PURPOSE_GAMMA = np.uint64(GAMMA), np.uint64(reference.PURPOSE_GAMMA)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = (np.uint64(shift) for shift in (27, 30, 31, 32))
_A, _B = np.uint32(reference.MULTIPLIER_A), np.uint32(reference.MULTIPLIER_B)
_15, _16 = np.uint32(15), np.uint32(16)
_SCALE, _OFFSET = np.float32(reference.SCALE), np.float32(reference.OFFSET)
_VECTOR_CHUNK = 64  # tokens that are tested together
_ARGMAX_CHUNK = 512  # values whose largest is found without looking where it is
# Above what rounding of values, of exp and of logarithms can hide.
_MARGIN = 1.001


@njit()
def _mix64(word):
    word = (word ^ (word >> _30)) * _MIX_A
    word = (word ^ (word >> _27)) * _MIX_B
    return word ^ (word >> _31)


@njit()
def row_key(seed, position, purpose):
    """The 64 bits that a row's noise is made from; seed and purpose uint64."""
    word = _mix64(seed + _GAMMA) + np.uint64(position) * _GAMMA
    return _mix64(word + purpose * _PURPOSE_GAMMA)


@njit(inline="always")
def _finalise(word):
    word = np.uint32((word ^ (word >> _16)) * _A)
    word = np.uint32((word ^ (word >> _15)) * _B)
    return np.uint32(word ^ (word >> _16))


@njit(inline="always")
def _uniform(token, first, second):
    bits = _finalise(np.uint32(_finalise(np.uint32(np.uint32(token) ^ first)) ^ second))
    return np.float32(np.float32(bits) * _SCALE) + _OFFSET


@njit()
def uniform(token, key):
    """float32 between 2^-33 and 1 - 2^-24, of one token."""
    return _uniform(token, np.uint32(key), np.uint32(key >> _32))


@njit()
def gumbel(u):
    """Standard Gumbel noise of a uniform number, float32."""
    return -np.float32(math.log(-np.float32(math.log1p(-u))))


@njit()
def argmax(values):
    """The place of the largest value, the first of equal ones."""
    start, found = 0, largest(values[:_ARGMAX_CHUNK])
    for begin in range(_ARGMAX_CHUNK, values.shape[0], _ARGMAX_CHUNK):
        highest = largest(values[begin : begin + _ARGMAX_CHUNK])
        if highest > found:
            start, found = begin, highest
    while values[start] != found and start < values.shape[0] - 1:
        start += 1
    return start


@njit()
def _can_win(weights, tokens, first, second, limit):
    """Whether any of these tokens has a number small enough for its weight."""
    count = np.int32(0)
    for i in range(weights.shape[0]):
        count += np.int32(_uniform(tokens[i], first, second) <= weights[i] * limit)
    return count > 0


@njit()
def _sum(values, weights, place, u):
    value = values[place] if values.shape[0] else np.float32(math.log(weights[place]))
    return np.float32(value + gumbel(u))


@njit()
def _limit(total):
    """What u / weight must not exceed for a sum that is not below this one."""
    return np.float32(math.exp(-total) * _MARGIN)


@njit()
def draw(values, weights, tokens, key):
    """The place of the largest value + noise, the first of equal ones.

    weights: exp of values, up to one factor, at most 1 and somewhere 1. values may be empty: they
    are then the logarithms of weights.
    """
    first, second = np.uint32(key), np.uint32(key >> _32)
    best = argmax(weights)  # a good sum to begin with leaves little to do
    total = _sum(values, weights, best, _uniform(tokens[best], first, second))
    limit = _limit(total)
    for begin in range(0, weights.shape[0], _VECTOR_CHUNK):
        end = min(begin + _VECTOR_CHUNK, weights.shape[0])
        own, ids = weights[begin:end], tokens[begin:end]
        if largest(own) * limit < _OFFSET or not _can_win(own, ids, first, second, limit):
            continue
        for place in range(begin, end):
            u = _uniform(tokens[place], first, second)
            if u <= weights[place] * limit:
                found = _sum(values, weights, place, u)
                if found > total or (found == total and place < best):
                    best, total = place, found
                    limit = _limit(total)
    return best
