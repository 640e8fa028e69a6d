"""Losses and gradients of a chunk of rows over the whole vocabulary at once: the quick path.

The logits of each row are formed once, turned into the loss's gradient where they lie, and dropped.
Three [n, S] tensors in wide precision and one in the weights' are alive at a time, however many
depths share the chunk's teacher.

n rows, D hidden size, V vocabulary, S draft vocabulary (V without one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.train.losses.kinds import LossKind, Sums, Terms
from headstart.train.losses.lm_head import LmHead


@dataclass(frozen=True)
class Labels:
    """Labels of n rows: original ids, rows of the draft head, and whether they are there."""

    ids: Tensor
    places: Tensor
    is_inside: Tensor


@dataclass(frozen=True)
class Scored:
    """A scored chunk: the sums, the terms of the loss, d loss / d scaled states, the arg-max."""

    sums: Sums
    terms: Terms
    gradient: Tensor  # [n, D]
    best: Tensor  # [n] original ids


# Of depths against the same labels and teacher, as `score_whole` below.
Score = Callable[[LossKind, LmHead, list[Tensor], Labels, Tensor | None, float], list[Scored]]


@dataclass(frozen=True)
class _Target:
    probs: Tensor  # [n, S], not renormalised
    mass: Tensor  # [n]
    log_sum: Tensor  # [n], sum of p log p; NaN where the loss does not need it
    has_top: Tensor  # [n]


def score_whole(
    kind: LossKind,
    head: LmHead,
    depths: list[Tensor],
    labels: Labels,
    teacher: Tensor | None,
    decay: float,
) -> list[Scored]:
    """Each depth's states [n, D] against the same labels and teacher states [n, D]."""
    target = None if teacher is None else _target(kind, head, teacher)
    return [_score(kind, head, states, labels, target, decay) for states in depths]


def _target(kind: LossKind, head: LmHead, states: Tensor) -> _Target:
    logits = states @ head.weight.T
    has_top = head.has_draft(_best(head, logits))
    soft_max = torch.log_softmax if kind.needs_cross else torch.softmax
    found = soft_max(logits, -1, dtype=head.wide)
    del logits
    if head.vocab_ids is not None:
        found = found.index_select(1, head.vocab_ids)
    probs = found.exp() if kind.needs_cross else found
    mass = probs.sum(-1)
    log_sum = found.mul_(probs).sum(-1) if kind.needs_cross else torch.full_like(mass, torch.nan)
    return _Target(probs, mass, log_sum, has_top)


def _best(head: LmHead, logits: Tensor) -> Tensor:
    """[n] places of the largest logits. A CPU finds them four times as fast in wide precision."""
    return logits.to(head.wide).argmax(-1)


def _score(
    kind: LossKind,
    head: LmHead,
    states: Tensor,
    labels: Labels,
    target: _Target | None,
    decay: float,
) -> Scored:
    logits = states @ head.draft_weight.T
    best = head.original_ids(_best(head, logits))
    at_label = labels.places.unsqueeze(-1)
    if target is None or kind.needs_cross:
        scratch = torch.log_softmax(logits, -1, dtype=head.wide)  # log q, overwritten below
        probs = scratch.exp()
        label_log_prob = scratch.gather(1, at_label).squeeze(-1)
    else:
        probs = torch.softmax(logits, -1, dtype=head.wide)
        scratch = torch.empty_like(probs)
        label_log_prob = probs.gather(1, at_label).squeeze(-1).log()
    unknown = torch.full_like(label_log_prob, torch.nan)
    overlap = cross = below = mass = unknown
    has_top = labels.is_inside
    if target is not None:
        mass, has_top = target.mass, target.has_top
        if kind.needs_cross:
            cross = target.log_sum - scratch.mul_(target.probs).sum(-1)
        overlap = torch.minimum(probs, target.probs, out=scratch).sum(-1)
        if kind.needs_below:
            torch.le(probs, target.probs, out=scratch)  # 1 or 0: what `_mix` goes on from
            below = torch.einsum("ns,ns->n", probs, scratch)
    sums = Sums(label_log_prob, labels.is_inside, overlap, below, mass, cross, has_top)
    terms = kind.terms(sums, decay)
    _mix(terms, probs, target, labels, out=scratch)
    return Scored(sums, terms, logits.copy_(scratch) @ head.draft_weight, best)


def _mix(
    terms: Terms,
    probs: Tensor,
    target: _Target | None,
    labels: Labels,
    *,
    out: Tensor,
) -> None:
    """d loss / d logits, [n, S], into `out`, which says where q <= p for a loss that needs it."""
    draft = terms.draft.unsqueeze(-1)
    if terms.below is not None:
        out.mul_(terms.below.unsqueeze(-1)).add_(draft).mul_(probs)
    else:
        torch.mul(probs, draft, out=out)
    if terms.target is not None and target is not None:
        out.addcmul_(target.probs, terms.target.unsqueeze(-1))
    if terms.label is not None:
        out.scatter_add_(1, labels.places.unsqueeze(-1), terms.label.unsqueeze(-1))
