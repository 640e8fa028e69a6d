"""What kernels say of rows of logits that a loss is made of, and what they make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class RowSums:
    """Of n rows, each [n] fp32; NaN without labels, and without a p to compare with.

    q is the draft's distribution, p the trunk's on the same tokens.
    """

    log_norm: Tensor  # log of the soft-max's denominator
    best: Tensor  # int64: place of the largest logit, the lowest of equal ones
    label_log_prob: Tensor  # log q at the label's place
    overlap: Tensor  # sum of min(p, q)
    below: Tensor  # sum of q where q <= p
    mass: Tensor  # sum of p
    cross: Tensor  # sum of p * (log p - log q)


@dataclass(frozen=True)
class Mixture:
    """A gradient on logits: weights [n] of q, of p, of q where q <= p, and of the label."""

    draft: Tensor
    target: Tensor | None = None
    below: Tensor | None = None
    label: Tensor | None = None


class LossKernels(Protocol):
    """A module of kernels: for GPUs `backends/cuda/kernels/losses.py`, for CPUs
    `backends/numba/losses.py`."""

    def row_sums(
        self,
        logits: Tensor,
        places: Tensor | None = None,
        target: Tensor | None = None,
        target_norm: Tensor | None = None,
    ) -> RowSums:
        """logits [n, S]; places [n] of the labels. target [n, S]: the trunk's logits, target_norm
        [n] their normaliser, which may reach over more than S tokens."""

    def mix_(
        self,
        logits: Tensor,
        log_norm: Tensor,
        mixture: Mixture,
        places: Tensor,
        target: Tensor | None = None,
        target_norm: Tensor | None = None,
    ) -> Tensor:
        """Overwrite logits [n, S] with the gradient; the rest as in `row_sums`."""
