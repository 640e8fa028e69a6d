"""What happens to one row between products: norm, rotation, SwiGLU.

Every function treats one row by itself in code that knows nothing of others, so that its bits
depend on nothing else. Where sums may be reordered for speed, the order follows from sizes
that all rows share.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headstart.backends.numba.compiler import njit

# Added to a float32 below 2^22 it leaves the nearest whole number in the last bits.
ROUNDING = np.float32(1.5 * 2**23)
# exp of more or less counts for nothing beside 1, and what it is multiplied with stays a normal
# float32: others are computed many times slower.
_LOWEST, _HIGHEST = np.float32(-60), np.float32(60)
_PER_LOG2 = np.float32(1 / math.log(2))
# ln 2 in two parts: the first has few bits, so that a whole multiple of it is exact
_LOG2_HIGH = np.float32(0.693359375)
_LOG2_LOW = np.float32(math.log(2) - 0.693359375)
_1, _2, _3, _4, _5, _6 = (np.float32(1 / math.factorial(n)) for n in range(1, 7))
ONE = np.float32(1)


@intrinsic
def float_of(typing: Any, bits: Any) -> tuple[Any, Any]:
    """The float32 that has these 32 bits."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        return build.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of(typing: Any, number: Any) -> tuple[Any, Any]:
    """The 32 bits of a float32."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        return build.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(inline="always")
def sortable_bits(bits):
    """A float32's bits as an integer that sorts as the float32 does; its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit()
def largest(row):
    """Of whole numbers vectors find the largest; of floats, compilers leave it one by one."""
    found = sortable_bits(bits_of(row[0]))
    for i in range(row.shape[0]):
        number = sortable_bits(bits_of(row[i]))
        found = number if number > found else found
    return float_of(sortable_bits(found))


@njit(inline="always")
def exp(x):
    """exp of a float32 in operations that vectors have: 2^n times a series on +-ln 2 / 2."""
    x = x if x > _LOWEST else _LOWEST  # not min and max, which heed NaN and are no vectors
    x = x if x < _HIGHEST else _HIGHEST
    n = (x * _PER_LOG2 + ROUNDING) - ROUNDING
    r = (x - n * _LOG2_HIGH) - n * _LOG2_LOW
    series = ONE + r * (_1 + r * (_2 + r * (_3 + r * (_4 + r * (_5 + r * _6)))))
    return series * float_of(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(fastmath={"reassoc", "contract"})
def dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@njit()
def norm(x, weight, eps, out):
    """RMSNorm of one row."""
    mean = dot(x, x) / np.float32(x.shape[0])
    factor = ONE / np.float32(math.sqrt(mean + np.float32(eps)))
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


@njit(inline="always")
def gate(x):
    """The sigmoid."""
    return ONE / (ONE + exp(-x))


@njit(inline="always")
def silu(x):
    x = x if x > _LOWEST else _LOWEST  # below, silu is nothing
    return x / (ONE + exp(-x))


@njit()
def swiglu(gate_up, out):
    """silu of the first half times the second."""
    width = out.shape[0]
    for i in range(width):
        out[i] = silu(gate_up[i]) * gate_up[width + i]


@njit()
def limited_swiglu(gate_up, most, is_before, out):
    """The same with both halves cut off, the gate's before its activation or behind it."""
    width = out.shape[0]
    for i in range(width):
        x, up = gate_up[i], gate_up[width + i]
        up = up if up < most else most
        up = up if up > -most else -most
        opened = silu(x if x < most or not is_before else most)
        out[i] = (opened if opened < most or is_before else most) * up


@njit()
def rotate(head, cos, sin, scale, out):
    """Rotate one head, and scale it; what is not rotated is only scaled.

    `sin` has the sign of each first half.
    """
    half = cos.shape[0] // 2
    for i in range(half):
        out[i] = (head[i] * cos[i] + head[half + i] * sin[i]) * scale
    for i in range(half):
        out[half + i] = (head[half + i] * cos[half + i] + head[i] * sin[half + i]) * scale
    for i in range(cos.shape[0], head.shape[0]):
        out[i] = head[i] * scale


@njit()
def rotate_pairs(head, cos, sin, scale, out):
    """The same where the dimensions of a pair are neighbours."""
    for i in range(0, cos.shape[0], 2):
        out[i] = (head[i] * cos[i] + head[i + 1] * sin[i]) * scale
        out[i + 1] = (head[i + 1] * cos[i + 1] + head[i] * sin[i + 1]) * scale
    for i in range(cos.shape[0], head.shape[0]):
        out[i] = head[i] * scale


@njit()
def copy(row, out):
    for i in range(row.shape[0]):
        out[i] = row[i]


@njit()
def fill(row, value):
    for i in range(row.shape[0]):
        row[i] = value


@njit()
def gathered(x, order):
    """Rows x [n, K] with their inputs in another order."""
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[row, k] = x[row, order[k]]
    return out
