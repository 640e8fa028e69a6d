"""Stateless noise: a function of (seed, absolute position, token id, purpose) and of nothing else.

A row's key is 64 bits, mixed from seed, position and purpose; each token passes twice through a
32-bit finaliser, once per half of the key. Only integers up to `bits`, 32 of them per token, so
PyTorch and Triton agree exactly. tests/unit/sampling/test_noise.py has the test vectors: a change
to any constant below changes the text of every seeded request.

R rows, V tokens, k candidates per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.sampling.params import GAMMA, MASK64, mix64

CHOICE = 0  # the target's choice, and the draft's, which must see the same noise to agree with it
ACCEPTANCE = 1  # the test of the rejection rule
RESIDUAL = 2  # the draw that follows a rejection

PURPOSE_GAMMA = 0x8CB92BA72F3D8DD7

# The finaliser is "lowbias32" of Chris Wellons' hash prospector (public domain).
MULTIPLIER_A, MULTIPLIER_B = 0x7FEB352D, 0x846CA68B

# float32(bits) may round up to 2**32; this scale keeps even that below 1, where log(0) would wait.
SCALE = 2.0**-32 - 2.0**-56
OFFSET = 2.0**-33

LARGEST_GUMBEL = 22.8739  # bits = 0: -log(2**-33), up to rounding
SMALLEST_GUMBEL = -2.8116  # bits = 2**32 - 1: -log(-log(2**-24)), up to rounding


def bits(
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    token_ids: Tensor,
    purpose: int | Tensor = CHOICE,
) -> Tensor:
    """32 random bits per row and token, as int32 [R, V] or [R, k].

    seeds, positions [R]; token_ids [V] for all rows or [R, k]; purpose one for all or [R].
    """
    first, second = _keys(seeds, positions, purpose, token_ids.device)
    word = token_ids.to(torch.int32) ^ first
    scratch = torch.empty_like(word)
    _finalise(word, scratch)
    word ^= second
    _finalise(word, scratch)
    return word


def uniform(
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    token_ids: Tensor,
    purpose: int | Tensor = CHOICE,
) -> Tensor:
    """float32 between 2**-33 and 1 - 2**-24, both included: never 0, never 1."""
    unsigned = bits(seeds, positions, token_ids, purpose).view(torch.uint32)
    return unsigned.to(torch.float32).mul_(SCALE).add_(OFFSET)


def gumbel(
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    token_ids: Tensor,
    purpose: int | Tensor = CHOICE,
) -> Tensor:
    """float32 standard Gumbel noise between SMALLEST_GUMBEL and LARGEST_GUMBEL.

    -log(-log(1 - u)): small u, which float32 resolves finely, make the upper tail, which decides.
    -log(-log(u)) would have at most 24 bits there, and ties among the most likely winners.
    """
    u = uniform(seeds, positions, token_ids, purpose)
    return u.neg_().log1p_().neg_().log_().neg_()


def _finalise(word: Tensor, scratch: Tensor) -> None:
    """One round, in place, on int32 as if it were unsigned."""
    for shift, multiplier in ((16, MULTIPLIER_A), (15, MULTIPLIER_B), (16, None)):
        # int32 shifts copy the sign bit down; the mask takes the copies away.
        torch.bitwise_right_shift(word, shift, out=scratch)
        scratch &= (1 << (32 - shift)) - 1
        word ^= scratch
        if multiplier is not None:
            word *= _signed(multiplier, 32)


def row_key(seed: int, position: int, purpose: int = CHOICE) -> int:
    """The 64 bits that a row's noise is made from."""
    return mix64(mix64(seed + GAMMA) + position * GAMMA + purpose * PURPOSE_GAMMA)


def _keys(
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    purpose: int | Tensor,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The two halves of each row's key, int32 [R, 1].

    Numbers are mixed as Python integers, which for a few rows is faster; tensors stay on their
    device, since reading them would make a GPU wait.
    """
    if isinstance(seeds, Tensor) or isinstance(positions, Tensor) or isinstance(purpose, Tensor):
        word = _row_keys(_words(seeds, device), _words(positions, device), _words(purpose, device))
    else:
        keys = [row_key(s, p, purpose) for s, p in zip(seeds, positions, strict=True)]
        word = _words(keys, device)
    word = word.unsqueeze(-1)
    return word.to(torch.int32), (word >> 32).to(torch.int32)


def _row_keys(seeds: Tensor, positions: Tensor, purpose: Tensor) -> Tensor:
    """`row_key` on int64 tensors."""
    word = _mix64(seeds + _signed(GAMMA, 64)) + positions * _signed(GAMMA, 64)
    return _mix64(word + purpose * _signed(PURPOSE_GAMMA, 64))


def _mix64(word: Tensor) -> Tensor:
    """`params.mix64` on int64 tensors."""
    word = (word ^ _shift64(word, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    word = (word ^ _shift64(word, 27)) * _signed(0x94D049BB133111EB, 64)
    return word ^ _shift64(word, 31)


def _shift64(word: Tensor, shift: int) -> Tensor:
    return (word >> shift) & (MASK64 >> shift)


def _words(numbers: int | Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """64-bit words, which int64 holds with the same bits."""
    if isinstance(numbers, Tensor):
        return numbers.to(device, torch.int64)
    if isinstance(numbers, int):
        return torch.tensor(_signed(numbers, 64), device=device)
    return torch.tensor([_signed(n, 64) for n in numbers], dtype=torch.int64, device=device)


def _signed(value: int, width: int) -> int:
    """The signed integer with the same low bits."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value
