"""The noise of `sampling/noise.py` inside kernels: the same bits."""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit

_SCALE = tl.constexpr(2.0**-32 - 2.0**-56)
_OFFSET = tl.constexpr(2.0**-33)


@jit
def _mix64(word):
    """`sampling.params.mix64`; uint64 wraps."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@jit
def row_keys(seeds, positions, PURPOSE: tl.constexpr = 0):
    """The halves of `sampling.noise.row_key`."""
    gamma: tl.constexpr = 0x9E3779B97F4A7C15
    other: tl.constexpr = (PURPOSE * 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    word = _mix64(seeds.to(tl.uint64, bitcast=True) + gamma)
    word = _mix64(word + positions.to(tl.uint64, bitcast=True) * gamma + other)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@jit
def _finalise(word):
    """One round of the 32-bit finaliser; uint32 wraps."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@jit
def noise_bits(tokens, first, second):
    """32 bits for (key, token): `sampling.noise.bits`."""
    word = _finalise(tokens.to(tl.uint32) ^ first)
    return _finalise(word ^ second)


@jit
def uniform_of(bits):
    """`sampling.noise.uniform` of the bits."""
    return bits.to(tl.float32) * _SCALE + _OFFSET


@jit
def gumbel_of(bits):
    """`sampling.noise.gumbel` of the bits."""
    u = uniform_of(bits)
    # log1p by a series where 1 - u would lose the digits of u.
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.01, small, -tl.log(1.0 - u)))
