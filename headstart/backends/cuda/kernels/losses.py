"""What losses of draft rows read and write, one program per row of logits.

The distributions exist in registers only: a row of logits is read for its normaliser, again for the
sums (then from a cache close by), and once more when it is overwritten with the gradient. q is the
draft's distribution, p the trunk's on the same tokens; p may lack what lies outside them.

n rows, S tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.losses import Mixture, RowSums

_BLOCK = 4096  # tokens at a time
_WARPS = 8
_FAR_BELOW = tl.constexpr(-1e30)


def row_sums(
    logits: Tensor,
    places: Tensor | None = None,
    target: Tensor | None = None,
    target_norm: Tensor | None = None,
) -> RowSums:
    """See `LossKernels`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and (target is None or target.is_contiguous())
    assert (target is None) == (target_norm is None)
    numbers = torch.full((6, rows), torch.nan, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _row_sums[(rows,)](
        logits, places, target, target_norm, numbers, best, rows, width,
        HAS_LABELS=places is not None, HAS_TARGET=target is not None,
        BLOCK=_block(width), num_warps=_WARPS,
    )  # fmt: skip
    return RowSums(numbers[0], best, *numbers[1:])


def mix_(
    logits: Tensor,
    log_norm: Tensor,
    mixture: Mixture,
    places: Tensor,
    target: Tensor | None = None,
    target_norm: Tensor | None = None,
) -> Tensor:
    """See `LossKernels`."""
    rows, width = logits.shape
    parts = (mixture.draft, mixture.target, mixture.below, mixture.label)
    weights = [None if part is None else part.float().contiguous() for part in parts]
    _mix[(rows,)](
        logits, log_norm, places, target, target_norm, *weights, width,
        HAS_TARGET=mixture.target is not None, HAS_BELOW=mixture.below is not None,
        HAS_LABEL=mixture.label is not None, BLOCK=_block(width), num_warps=_WARPS,
    )  # fmt: skip
    return logits


def _block(width: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(width)))


@jit
def _row_sums(
    logits_ptr, places_ptr, target_ptr, norm_ptr, numbers_ptr, best_ptr, rows, width,
    HAS_LABELS: tl.constexpr, HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    columns = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    best = tl.full((), 0, tl.int64)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        logits = tl.load(logits_ptr + at, at < width, float("-inf")).to(tl.float32)
        value, place = tl.max(logits, 0, return_indices=True)
        best = tl.where(value > top, begin + place, best)
        raised = tl.maximum(top, value)
        total = total * tl.exp(top - raised) + tl.sum(tl.exp(logits - raised), 0)
        top = raised
    log_norm = top + tl.log(total)
    tl.store(best_ptr + row, best)
    tl.store(numbers_ptr + row, log_norm)
    if HAS_LABELS:
        label = tl.load(logits_ptr + tl.load(places_ptr + row)).to(tl.float32)
        tl.store(numbers_ptr + rows + row, label - log_norm)
    if HAS_TARGET:
        target_ptr += row * width
        target_norm = tl.load(norm_ptr + row)
        overlap = 0.0
        below = 0.0
        mass = 0.0
        cross = 0.0
        for begin in range(0, width, BLOCK):
            at = begin + columns
            is_there = at < width
            log_q = tl.load(logits_ptr + at, is_there, 0.0).to(tl.float32) - log_norm
            log_p = tl.load(target_ptr + at, is_there, 0.0).to(tl.float32) - target_norm
            # Finite past the end, too: infinity less infinity would spoil the sum.
            log_q = tl.where(is_there, log_q, _FAR_BELOW)
            log_p = tl.where(is_there, log_p, _FAR_BELOW)
            q = tl.exp(log_q)
            p = tl.exp(log_p)
            overlap += tl.sum(tl.minimum(p, q), 0)
            below += tl.sum(tl.where(q <= p, q, 0.0), 0)
            mass += tl.sum(p, 0)
            cross += tl.sum(p * (log_p - log_q), 0)
        # The smaller of NaN and a number is that number.
        overlap += (log_norm + target_norm) * 0.0
        tl.store(numbers_ptr + 2 * rows + row, overlap)
        tl.store(numbers_ptr + 3 * rows + row, below)
        tl.store(numbers_ptr + 4 * rows + row, mass)
        tl.store(numbers_ptr + 5 * rows + row, cross)


@jit
def _mix(
    logits_ptr, log_norm_ptr, places_ptr, target_ptr, norm_ptr, draft_ptr, of_target_ptr,
    below_ptr, label_ptr, width, HAS_TARGET: tl.constexpr, HAS_BELOW: tl.constexpr,
    HAS_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    log_norm = tl.load(log_norm_ptr + row)
    draft = tl.load(draft_ptr + row)
    columns = tl.arange(0, BLOCK)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        is_there = at < width
        q = tl.exp(tl.load(logits_ptr + at, is_there, float("-inf")).to(tl.float32) - log_norm)
        gradient = draft * q
        if HAS_TARGET or HAS_BELOW:
            log_p = tl.load(target_ptr + row * width + at, is_there, float("-inf")).to(tl.float32)
            p = tl.exp(log_p - tl.load(norm_ptr + row))
            if HAS_TARGET:
                gradient += tl.load(of_target_ptr + row) * p
            if HAS_BELOW:
                gradient += tl.load(below_ptr + row) * tl.where(q <= p, q, 0.0)
        if HAS_LABEL:
            is_label = at == tl.load(places_ptr + row)
            gradient += tl.where(is_label, tl.load(label_ptr + row), 0.0)
        tl.store(logits_ptr + at, gradient.to(logits_ptr.dtype.element_ty), is_there)
