"""silu(gate) * up inside of kernels, where both may be cut off."""

from __future__ import annotations

import triton.language as tl

from headstart.backends.cuda.kernels.jit import jit


@jit
def gated(gate, up, LIMIT: tl.constexpr = 0):
    """In fp32. LIMIT: what silu(gate) is cut off at, and up on both sides; 0: nothing is."""
    value = gate * tl.sigmoid(gate)
    if LIMIT:
        value = tl.minimum(value, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return value * up
