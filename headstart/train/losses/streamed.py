"""Losses and gradients of a chunk of rows, the vocabulary in chunks too: the frugal path.

A first pass finds each row's normaliser (a running log-sum-exp), a second one forms the logits
again and adds up the sums and the products of q, p and q-where-q<=p with the LM head. The weights
of those products are known only at the end, so they are kept apart. Memory is bounded whatever V
is, at the price of forming the logits twice; gradients of a bf16 head are also a little coarser
than on the quick path, because differences are taken after the products.

n rows, D hidden size, V vocabulary, S draft vocabulary (V without one), C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headstart.train.losses.kinds import LossKind, Sums
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.whole import Labels, Scored


def score_streamed(
    kind: LossKind,
    head: LmHead,
    depths: list[Tensor],
    labels: Labels,
    teacher: Tensor | None,
    decay: float,
    *,
    vocab_chunk: int,
) -> list[Scored]:
    """Each depth's states [n, D] against the same labels and teacher states [n, D]."""
    target = None if teacher is None else _TargetSums(head, teacher, vocab_chunk)
    drafts = [_DraftSums(head, states, vocab_chunk) for states in depths]
    pieces = (_pieces(part, vocab_chunk) for part in (head.draft_weight, head.taught_weight))
    for weight, taught in zip(*pieces, strict=True):
        probs = None if target is None else target.add(kind, weight, taught)
        for draft in drafts:
            draft.add(kind, weight, probs)
    return [draft.finish(kind, head, labels, target, decay) for draft in drafts]


class _TargetSums:
    """Of the trunk's distribution, shared by all depths."""

    def __init__(self, head: LmHead, states: Tensor, vocab_chunk: int) -> None:
        self.states = states
        self.log_norm, best = _normalise(head, head.weight, states, vocab_chunk)
        self.has_top = head.has_draft(best)
        self.mass = torch.zeros_like(self.log_norm)
        self.log_sum = torch.zeros_like(self.log_norm)
        self.product = _zeros(head, states)

    def add(self, kind: LossKind, weight: Tensor, taught: Tensor) -> Tensor:
        """Takes in one piece of the draft's and of the trunk's LM head [C, D]; returns the trunk's
        probabilities [n, C]."""
        log_probs = _log_probs(self.states, taught, self.log_norm)
        probs = log_probs.exp()
        self.mass += probs.sum(-1)
        self.log_sum += log_probs.mul_(probs).sum(-1)
        if kind.needs_cross:
            self.product += probs.to(weight.dtype) @ weight
        return probs


class _DraftSums:
    """Of the head's distribution at one depth."""

    def __init__(self, head: LmHead, states: Tensor, vocab_chunk: int) -> None:
        self.states = states
        self.log_norm, self.best = _normalise(head, head.draft_weight, states, vocab_chunk)
        self.cross = torch.zeros_like(self.log_norm)
        self.overlap = torch.zeros_like(self.log_norm)
        self.below = torch.zeros_like(self.log_norm)
        self.product = _zeros(head, states)
        self.below_product = _zeros(head, states)

    def add(self, kind: LossKind, weight: Tensor, target_probs: Tensor | None) -> None:
        """Takes in one piece of the LM head [C, D] and the trunk's probabilities there [n, C]."""
        scratch = _log_probs(self.states, weight, self.log_norm)
        probs = scratch.exp()
        self.product += probs.to(weight.dtype) @ weight
        if target_probs is None:
            return
        if kind.needs_cross:
            self.cross -= scratch.mul_(target_probs).sum(-1)
        self.overlap += torch.minimum(probs, target_probs, out=scratch).sum(-1)
        if kind.needs_below:
            torch.mul(probs, probs <= target_probs, out=scratch)
            self.below += scratch.sum(-1)
            self.below_product += scratch.to(weight.dtype) @ weight

    def finish(
        self,
        kind: LossKind,
        head: LmHead,
        labels: Labels,
        target: _TargetSums | None,
        decay: float,
    ) -> Scored:
        label_rows = head.draft_weight[labels.places].to(head.wide)
        label_logit = (self.states.to(head.wide) * label_rows).sum(-1)
        unknown = torch.full_like(self.log_norm, torch.nan)
        sums = Sums(
            label_logit - self.log_norm,
            labels.is_inside,
            overlap=unknown if target is None else self.overlap,
            below=self.below if target is not None and kind.needs_below else unknown,
            mass=unknown if target is None else target.mass,
            cross=target.log_sum + self.cross if target and kind.needs_cross else unknown,
            has_top=labels.is_inside if target is None else target.has_top,
        )
        terms = kind.terms(sums, decay)
        gradient = self.product.mul_(terms.draft.unsqueeze(-1))
        if terms.below is not None:
            gradient.addcmul_(self.below_product, terms.below.unsqueeze(-1))
        if terms.target is not None and target is not None:
            gradient.addcmul_(target.product, terms.target.unsqueeze(-1))
        if terms.label is not None:
            gradient.addcmul_(label_rows, terms.label.unsqueeze(-1))
        return Scored(sums, terms, gradient, head.original_ids(self.best))


def _normalise(
    head: LmHead, weight: Tensor, states: Tensor, vocab_chunk: int
) -> tuple[Tensor, Tensor]:
    """Log of the soft-max's denominator, and the arg-max (ties to the lowest row), each [n]."""
    top = torch.full(states.shape[:1], -torch.inf, dtype=head.wide, device=states.device)
    log_norm, best = top.clone(), torch.zeros_like(top, dtype=torch.int64)
    start = 0
    for piece in _pieces(weight, vocab_chunk):
        logits = (states @ piece.T).to(head.wide)
        value, place = logits.max(-1)
        best = torch.where(value > top, place + start, best)
        top = torch.maximum(top, value)
        log_norm = torch.logaddexp(log_norm, torch.logsumexp(logits, -1))
        start += len(piece)
    return log_norm, best


def _log_probs(states: Tensor, weight: Tensor, log_norm: Tensor) -> Tensor:
    return (states @ weight.T).to(log_norm.dtype).sub_(log_norm.unsqueeze(-1))


def _pieces(weight: Tensor, vocab_chunk: int) -> Iterator[Tensor]:
    for start in range(0, len(weight), vocab_chunk):
        yield weight[start : start + vocab_chunk]


def _zeros(head: LmHead, states: Tensor) -> Tensor:
    return torch.zeros(states.shape, dtype=head.wide, device=states.device)
