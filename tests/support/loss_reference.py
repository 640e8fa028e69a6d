"""Straight formulas of the losses for autograd, and random rows to try them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.rows import RowLosses, depth_losses

KINDS = ("ce", "kl", "lk", "tv", "e2e-tv")


@dataclass(frozen=True)
class Case:
    """R rows over V tokens; `ids` is a draft vocabulary or None."""

    states: Tensor
    weight: Tensor
    labels: Tensor
    teacher: Tensor
    ids: Tensor | None = None
    own: Tensor | None = None  # an LM head of the draft's own

    def losses(self, kind: str, **options: Any) -> RowLosses:
        options.setdefault("teacher", self.teacher if kind != "ce" else None)
        head = LmHead.of(self.weight, self.ids, self.own)
        return depth_losses(kind, [self.states], head, labels=self.labels, **options)[0]


def case(num_rows: int = 13, *, vocab: int = 41, hidden: int = 6, pruned: bool = False) -> Case:
    """Random rows in fp64; a pruned case has labels and likeliest tokens on both sides of S."""
    made = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    ids = torch.arange(0, vocab, 2) if pruned else None
    labels = torch.randint(0, vocab, (num_rows,), generator=made)
    return Case(
        normal(num_rows, hidden), normal(vocab, hidden), labels, normal(num_rows, hidden), ids
    )


def reference(
    kind: str, case: Case, states: Tensor, *, temperature: float = 1.0, decay: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Loss and overlap [R] of `states`, differentiable."""
    full = torch.softmax(case.teacher @ case.weight.T / temperature, -1)
    ids = torch.arange(len(case.weight)) if case.ids is None else case.ids
    target = full[:, ids]
    drafting = case.weight if case.own is None else case.own
    log_draft = torch.log_softmax(states @ drafting[ids].T / temperature, -1)
    overlap = torch.minimum(target, log_draft.exp()).sum(-1)
    has_label = torch.isin(case.labels, ids)
    place = (case.labels.unsqueeze(-1) == ids).int().argmax(-1)
    ce = -log_draft.gather(1, place.unsqueeze(-1)).squeeze(-1) * has_label
    renormalised = target / target.sum(-1, keepdim=True)
    kl = (renormalised * (renormalised.log() - log_draft)).sum(-1)
    kl = kl * torch.isin(full.argmax(-1), ids)
    far = torch.exp(-decay * overlap.detach())
    losses = {"ce": ce, "kl": kl, "lk": far * kl + (1 - far) * (1 - overlap)}
    return losses.get(kind, 1 - overlap), overlap


def close(found: Tensor, expected: Tensor, within: float = 1e-10) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=within, equal_nan=True)
