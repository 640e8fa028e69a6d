"""Losses and gradients of a chunk of rows by kernels: the quick path of GPUs and of CPUs.

As `whole.py`, with the logits as the only tensors of the vocabulary's size: each is formed once,
read by a kernel for its sums, and overwritten by another with the gradient.

n rows, D hidden size, V vocabulary, S draft vocabulary (V without one).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headstart.backends.losses import LossKernels, Mixture
from headstart.train.losses.kinds import LossKind, Sums
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.whole import Labels, Scored


@dataclass(frozen=True)
class _Target:
    logits: Tensor  # [n, S]
    log_norm: Tensor  # [n], over V
    has_top: Tensor  # [n]


def score_fused(
    kernels: LossKernels,
    kind: LossKind,
    head: LmHead,
    depths: list[Tensor],
    labels: Labels,
    teacher: Tensor | None,
    decay: float,
) -> list[Scored]:
    """Each depth's states [n, D] against the same labels and teacher states [n, D]."""
    target = None if teacher is None else _target(kernels, head, teacher)
    return [_score(kernels, kind, head, states, labels, target, decay) for states in depths]


def _target(kernels: LossKernels, head: LmHead, states: Tensor) -> _Target:
    logits = states @ head.weight.T
    found = kernels.row_sums(logits)
    if head.vocab_ids is not None:
        logits = states @ head.taught_weight.T  # cheaper than picking them out of the others
    return _Target(logits, found.log_norm, head.has_draft(found.best))


def _score(
    kernels: LossKernels,
    kind: LossKind,
    head: LmHead,
    states: Tensor,
    labels: Labels,
    target: _Target | None,
    decay: float,
) -> Scored:
    logits = states @ head.draft_weight.T
    compared = (None, None) if target is None else (target.logits, target.log_norm)
    found = kernels.row_sums(logits, labels.places, *compared)
    has_top = labels.is_inside if target is None else target.has_top
    sums = Sums(
        found.label_log_prob, labels.is_inside, found.overlap, found.below, found.mass,
        found.cross, has_top,
    )  # fmt: skip
    terms = kind.terms(sums, decay)
    mixture = Mixture(terms.draft, terms.target, terms.below, terms.label)
    kernels.mix_(logits, found.log_norm, mixture, labels.places, *compared)
    return Scored(sums, terms, logits @ head.draft_weight, head.original_ids(found.best))
