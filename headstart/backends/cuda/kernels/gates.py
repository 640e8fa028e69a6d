"""What heads have seen, scaled by sigmoids of the row; and the gate inside of feed-forward parts.

M rows, S splits, H query heads, D head size, V that of values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit


def gate_rows(rows: Tensor, partial: Tensor, dim: int) -> Tensor:
    """rows [M, H D] times the sigmoid of their gates, in place; partial as `place_qkv` has it."""
    splits, count, width = partial.shape
    heads = rows.shape[1] // dim
    _gate_rows[(count, heads)](
        rows, partial, count, width, SPLITS=splits, HEADS=heads, DIM=dim,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return rows


def gate_heads(rows: Tensor, partial: Tensor) -> Tensor:
    """rows [M, H, V] times a sigmoid of each head, of partial sums [S, M, H], in place."""
    count, heads, dim = rows.shape
    _gate_heads[(count, heads)](
        rows, partial, count, SPLITS=partial.shape[0], HEADS=heads, DIM=dim,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return rows


@jit(do_not_specialize=["count"])
def _gate_rows(rows, partial, count, width, SPLITS: tl.constexpr, HEADS: tl.constexpr,
               DIM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < DIM
    gate = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        where = (split * count + row) * width + (2 * head + 1) * DIM + at
        gate += tl.load(partial + where, mask, 0.0).to(tl.float32)
    kind = rows.dtype.element_ty
    target = rows + (row * HEADS + head) * DIM + at
    value = tl.load(target, mask, 0.0).to(tl.float32)
    share = tl.sigmoid(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(target, (value * share).to(kind), mask)


@jit(do_not_specialize=["count"])
def _gate_heads(rows, partial, count, SPLITS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    gate = tl.load(partial + row * HEADS + head).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        gate += tl.load(partial + (split * count + row) * HEADS + head).to(tl.float32)
    kind = rows.dtype.element_ty
    at = tl.arange(0, BLOCK)
    target = rows + (row * HEADS + head) * DIM + at
    value = tl.load(target, at < DIM, 0.0).to(tl.float32)
    share = tl.sigmoid(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(target, (value * share).to(kind), at < DIM)


@jit
def gated(gate, up, LIMIT: tl.constexpr = 0):
    """In fp32. LIMIT: what silu(gate) is cut off at, and up on both sides; 0: nothing is."""
    value = gate * tl.sigmoid(gate)
    if LIMIT > 0:
        value = tl.minimum(value, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return value * up
