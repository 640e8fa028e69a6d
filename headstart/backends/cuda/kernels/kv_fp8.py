"""Keys and values in 8-bit floats inside of kernels; `models/kv_fp8.py` says what is held.

The bits of an e4m3 number, shifted into those of fp16, are the number times 2^-8, exactly, and that
is its part of the power of two that its exponent stands for. So a key is compared in fp16 and the
score gets the power; what values are weighed with gets theirs. No number is converted by itself:
some operations on a word of 32 bits do four.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit
from headstart.models import kv_fp8

_MANTISSA = tl.constexpr(kv_fp8.MANTISSA)
_REST = tl.constexpr((1 << kv_fp8.MANTISSA) - 1)
_LEAST = tl.constexpr(kv_fp8.LEAST_SIZE)
_INVERSE = tl.constexpr(2 * kv_fp8.BIAS + kv_fp8.HIGHEST)
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@jit
def keep_fp8(first, second, cache, sizes, slot, first_at, second_at, is_own, is_half,
             HALF: tl.constexpr):  # fmt: skip
    """Numbers [EACH, N] of the dimensions `first_at` and `second_at` of heads go to their slots.

    cache: bytes [slots, 2 HALF]; sizes: int16 [slots, 2], of which the first is written.
    """
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
    bits = largest.to(tl.int32, bitcast=True)
    size = tl.maximum((bits >> _MANTISSA) + ((bits & _REST) > 0).to(tl.int32), _LEAST)
    power = ((-size + _INVERSE) << _MANTISSA).to(tl.float32, bitcast=True)
    base = cache + slot * 2 * HALF
    mask = is_own & is_half
    low = (first * power).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    high = (second * power).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(base + first_at % HALF * 2 + first_at // HALF, low, mask)
    tl.store(base + second_at % HALF * 2 + second_at // HALF, high, mask)
    tl.store(sizes + slot * 2, size.to(tl.int16), is_own)


@jit
def fp8_halves(words, like):
    """Words of two numbers -> both, as parts of their power, in fp16, or in fp32 beside that."""
    if _IS_INTERPRETED:
        bits = words.to(tl.int32)
        first = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16)
        second = ((bits & 0x8000) | ((bits & 0x7F00) >> 1)).to(tl.int16)
        low = first.to(tl.float16, bitcast=True)
        high = second.to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 7;"
            " and.b32 b, b, 0x3F803F80; or.b32 $0, a, b; and.b32 a, $2, 0x80008000;"
            " shr.b32 b, $2, 1; and.b32 b, b, 0x3F803F80; or.b32 $1, a, b; }",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low.to(like.dtype), high.to(like.dtype)


@jit
def powers(sizes):
    """Of keys and of values, from both exponents in a word of 32 bits; 0 of a slot without any."""
    of_keys = ((sizes & 0xFFFF) << _MANTISSA).to(tl.float32, bitcast=True)
    of_values = ((sizes >> 16) << _MANTISSA).to(tl.float32, bitcast=True)
    return of_keys, of_values


@jit
def for_products(query):
    """Queries in the type in which keys are compared."""
    if query.dtype == tl.bfloat16:
        query = query.to(tl.float16)
    return query
