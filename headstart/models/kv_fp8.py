"""Keys and values in 8-bit floats (e4m3), with one scale per token and head.

A scale is a power of two, so that dividing by it loses nothing, and only its exponent is kept: of
the smallest power that no number of the token's head exceeds. What is held depends on that token's
own numbers alone: not on other rows of a pass, on chunks, or on what a text says later, and nothing
has to be calibrated. A scale of a whole tensor or head would have to be known before the first
token, and numbers beyond it would be cut off.

Two dimensions share a word: d in its low byte, and d + D / 2 in its high byte. Kernels read words
of 16 bits as fast as bf16, and a shift makes both bytes fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE_BYTES = 2  # of an exponent
# Numbers are within 2^8 after the division, the largest ones above 2^7: e4m3 reaches 448.
HIGHEST = 8
LEAST_SIZE = 16  # the exponent of all zeros
BIAS = 127  # of exponents in fp32
MANTISSA = 23  # bits


def to_kv_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., D] -> words int16 [..., D / 2] and exponents int16 [...]."""
    values = values.float()
    bits = values.abs().amax(-1).view(torch.int32)
    has_rest = (bits & ((1 << MANTISSA) - 1)) != 0
    sizes = ((bits >> MANTISSA) + has_rest.int()).clamp(min=LEAST_SIZE)
    codes = (values * _power(2 * BIAS + HIGHEST - sizes)).to(torch.float8_e4m3fn)
    low, high = codes.view(torch.uint8).chunk(2, dim=-1)
    words = torch.stack([low, high], dim=-1).flatten(-2).view(torch.int16)
    return words, sizes.to(torch.int16)


def from_kv_fp8(words: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that are meant, which bf16 and wider types hold exactly."""
    both = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
    codes = torch.cat(both.unbind(-1), dim=-1).view(torch.float8_e4m3fn)
    # In bf16 at once where that is asked for: copies of long contexts would be twice as large.
    kind = dtype if dtype == torch.bfloat16 else torch.float32
    return (codes.to(kind) * _power(sizes.int() - HIGHEST).to(kind)).to(dtype)


def rounded_kv(values: Tensor) -> Tensor:
    """The same numbers as 8-bit floats would hold them, in their own type."""
    return from_kv_fp8(*to_kv_fp8(values), values.dtype)


def _power(exponents: Tensor) -> Tensor:
    """2^(e - 127) [..., 1]."""
    return (exponents << MANTISSA).view(torch.float32).unsqueeze(-1)
