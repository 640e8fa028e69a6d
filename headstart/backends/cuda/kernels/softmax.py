"""A softmax over a context that is read piece by piece, for kernels that attend.

Of a step: `best` is the largest score of each line so far, `total` the sum of its weights and
`value` what they have gathered, both relative to `best`.
"""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit


@jit
def piece(length, cuts, usual, LEAST: tl.constexpr, CUT: tl.constexpr, STEP: tl.constexpr):
    """Tokens of a piece."""
    each = length * 0 + CUT
    if CUT == 0:
        least = length * 0 + LEAST
        if usual is not None:
            least = tl.load(usual)
        each = tl.cdiv(tl.maximum(tl.cdiv(length, cuts), least), STEP) * STEP
    return each


@jit
def gathered(scores, values, best, total, value):
    """The next scores [L, N] and values [N, D]. A line may have seen nothing, and see nothing."""
    top = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    value = value * shrink[:, None]
    value = tl.dot(weights.to(values.dtype), values, value, input_precision="ieee")
    return top, total, value


@jit
def gathered_by_2(scores, values, best, total, value):
    """The same where scores are logarithms to base 2.

    `best` of a line that has seen nothing is finite, or it sees something at once.
    """
    top = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(best - top)
    total = total * shrink + tl.sum(weights, 1)
    value = value * shrink[:, None]
    value = tl.dot(weights.to(values.dtype), values, value, input_precision="ieee")
    return top, total, value
