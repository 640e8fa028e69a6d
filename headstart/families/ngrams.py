"""An embedding of several tokens (Qwen3.8-Flash-Next): how many rows its hashed table has.

Each of several heads for every length of n-grams hashes into rows of its own, as many as a prime
number. The numbers are part of the model: loaded rows mean nothing without them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count as count_from
from itertools import islice
from math import isqrt

from headstart.families.dims import Fields

_MASK = (1 << 64) - 1
_STEP, _MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's


def head_sizes(fields: Fields) -> list[int]:
    """Rows of every head: the first primes from a number on. One layer has such an embedding."""
    return list(_primes(int(fields["ngram_vocab_size_base"]), num_heads(fields)))


def num_heads(fields: Fields) -> int:
    """Heads for all lengths of n-grams, from two tokens on."""
    return (int(fields["ngram_size"]) - 1) * int(fields["heads_per_ngram"])


def table_rows(fields: Fields) -> int:
    """Rows of the whole table, filled up to a multiple."""
    multiple = int(fields["make_ngram_vocab_size_divisible_by"])
    return -(-sum(head_sizes(fields)) // multiple) * multiple


def multipliers(fields: Fields) -> list[int]:
    """What the token at each place of an n-gram is multiplied with, the newest first."""
    half = max(1, ((1 << 63) - 1) // max(int(fields["vocab_size"]), 1) // 2)
    seeds = (int(fields["seed"]) + _STEP * (place + 1) for place in range(fields["ngram_size"]))
    return [2 * (_mixed(seed & _MASK) % half) + 1 for seed in seeds]


@lru_cache(maxsize=8)  # tables of tensors are asked for many times
def _primes(first: int, count: int) -> tuple[int, ...]:
    return tuple(islice(filter(_is_prime, count_from(first)), count))


def _mixed(value: int) -> int:
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
