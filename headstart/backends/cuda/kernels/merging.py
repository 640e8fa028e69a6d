"""Two results of attention over different keys become one, as if it had seen both.

S rows, H query heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

_ROWS = 16  # of a program


def merge_results(result: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Take `other` into `result`, in place: [S, H, D] each, sums [H, S] in fp32.

    The sums are log-sum-exps of the scores, in natural logarithms, and finite.
    """
    rows, heads, dim = result.shape
    assert result.is_contiguous() and other.is_contiguous()
    assert sums.is_contiguous() and other_sums.is_contiguous()
    _merge[(triton.cdiv(rows, _ROWS), heads)](
        result, sums, other, other_sums, rows, HEADS=heads, DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim), BLOCK_M=_ROWS, num_warps=4,
    )  # fmt: skip


@jit
def _merge(result, sums, other, other_sums, rows, HEADS: tl.constexpr, DIM: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_D)
    is_row = row < rows
    place = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + at[None, :]
    is_value = is_row[:, None] & (at[None, :] < DIM)
    own = tl.load(sums + head * rows + row, is_row, 0.0)
    new = tl.load(other_sums + head * rows + row, is_row, 0.0)
    top = tl.maximum(own, new)
    own_weight, new_weight = tl.exp(own - top), tl.exp(new - top)
    total = own_weight + new_weight
    value = tl.load(result + place, is_value, 0.0).to(tl.float32) * (own_weight / total)[:, None]
    added = tl.load(other + place, is_value, 0.0).to(tl.float32) * (new_weight / total)[:, None]
    tl.store(result + place, (value + added).to(result.dtype.element_ty), is_value)
    tl.store(sums + head * rows + row, top + tl.log(total), is_row)
