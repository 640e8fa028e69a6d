"""Integers of a few bits in 32-bit words, as AWQ, GPTQ and compressed-tensors pack them.

Element i of a row lies at bit i * bits, low bits first, for all three; they differ in which way a
row runs and in its order. AWQ packs eight outputs in the order 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WORD = 32
AWQ_BITS = 4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of 4-bit floats, by code
POWER_BIAS = 127  # of scales that are exponents of two
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output lies at bits 4 j of a word
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where an output lies: the inverse


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [..., W] -> the first `count` codes of each row, uint8 [..., count]."""
    import torch

    if WORD % bits:  # codes reach over the ends of words
        every = _shifted(words, torch.arange(WORD), 1)
        codes = every[..., : count * bits].reshape(*words.shape[:-1], count, bits)
        return (codes << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return _shifted(words, torch.arange(0, WORD, bits), 2**bits - 1)[..., :count]


def _shifted(words: torch.Tensor, shifts: torch.Tensor, mask: int) -> torch.Tensor:
    import torch

    # A shift of signed words fills up with the sign, which the mask takes away.
    parts = words.unsqueeze(-1) >> shifts.to(torch.int32)
    return parts.bitwise_and_(mask).to(torch.uint8).flatten(-2)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] -> int32 [..., n * bits / 32], for bits that divide a word."""
    import torch

    each = WORD // bits
    rows = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, each)
    words = (rows << torch.arange(0, WORD, bits)).sum(-1)
    return words.to(torch.int32)  # the upper half of the range wraps into negative numbers


def awq_unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, N/8] -> codes uint8 [rows, N], outputs in their order."""
    codes = unpack(words, AWQ_BITS, words.shape[-1] * len(_AWQ_ORDER))
    return _in_eights(codes)[..., list(_AWQ_PLACES)].flatten(-2)


def awq_pack(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `awq_unpack`."""
    return pack(_in_eights(codes)[..., list(_AWQ_ORDER)].flatten(-2), AWQ_BITS)


def _in_eights(codes: torch.Tensor) -> torch.Tensor:
    return codes.reshape(*codes.shape[:-1], -1, len(_AWQ_ORDER))


def gptq_zeros(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed zero points z, of which the first version of the format stores z - 1.

    The one is added to whole words, as it was taken from them: a zero of 0 has borrowed from its
    neighbour.
    """
    return words + _ones(bits)


def gptq_stored_zeros(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `gptq_zeros`, for the first version."""
    return words - _ones(bits)


def _ones(bits: int) -> int:
    return sum(1 << shift for shift in range(0, WORD, bits))
