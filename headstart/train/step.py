"""One packed row through one head: drafts of all depths, their losses, gradients, sums.

The rows that count are gathered before the LM head; the losses bring their gradients along
(train/losses), so nothing of the vocabulary's size lives longer than a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headstart.models.documents import Documents
from headstart.models.rope import RotaryTable
from headstart.train.learner import Learner
from headstart.train.losses.combine import end_to_end_loss, step_weights, weighted_loss
from headstart.train.losses.kinds import loss_kind
from headstart.train.losses.rows import RowLosses, depth_losses
from headstart.train.targets import Counts, Targets, targets


@dataclass(frozen=True)
class Batch:
    """A packed row of T tokens with what the frozen trunk says of it; shared by all heads."""

    names: list[str]  # of its records
    ids: Tensor  # [T]
    mask: Tensor  # [T] bool, on the CPU
    documents: Documents
    embedded: Tensor  # [T, D]
    states: Tensor  # [T, D], of the kind that the heads' contract names
    teachers: Tensor  # [T, D], after the final norm
    rotary: RotaryTable

    @cached_property
    def _targets(self) -> dict[int, Targets]:
        return {}

    def targets(self, num_depths: int) -> Targets:
        """On the device; made once for all heads."""
        if num_depths not in self._targets:
            found = targets(self.mask, self.documents, num_depths)
            self._targets[num_depths] = found.to(self.ids.device)
        return self._targets[num_depths]


@dataclass(frozen=True)
class Sums:
    """Sums over loss rows; they add up over packed rows and processes."""

    values: Tensor  # [4, K + 1] fp64: see the properties; the last column holds the whole loss

    @classmethod
    def zero(cls, num_depths: int, device: torch.device) -> Sums:
        return cls(torch.zeros(4, num_depths + 1, dtype=torch.float64, device=device))

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.values + other.values)

    @property
    def total(self) -> Tensor:
        """What is minimised; already divided by the counts of the step."""
        return self.values[0, -1]

    @property
    def loss(self) -> Tensor:
        """[K] of the rows' losses."""
        return self.values[0, :-1]

    @property
    def matches(self) -> Tensor:
        """[K] chains right up to and including the depth."""
        return self.values[1, :-1]

    @property
    def chains(self) -> Tensor:
        """[K] chains that have a label at every depth up to it."""
        return self.values[2, :-1]

    @property
    def kept(self) -> Tensor:
        """[K] rows that have a loss: a draft vocabulary may leave nothing to learn in others."""
        return self.values[3, :-1]


def learn(learner: Learner, batch: Batch, counts: Counts, *, is_filler: bool = False) -> Sums:
    """Add the gradients of one packed row to those of the step.

    A filler gives no gradient: it only keeps processes in step that share one set of weights.
    """
    options = learner.options
    assert options.context is not None
    wanted = batch.targets(options.num_depths)
    depths = learner.draft(
        batch.embedded, batch.rotary, batch.states, batch.documents,
        num_depths=options.num_depths, context=options.context, rows=wanted.drafting,
    )  # fmt: skip
    gathered = [
        states[starts.clamp_min(0)] for states, starts in zip(depths, wanted.starts, strict=True)
    ]
    losses = _losses(learner, batch, wanted, gathered)
    total = _total(learner, gathered, losses, wanted, batch.documents.num_rows, counts)
    (total * 0 if is_filler else total).backward()
    if is_filler:
        return Sums.zero(options.num_depths, batch.ids.device)
    return _sums(total.detach(), losses, wanted, batch.documents.num_rows)


def _losses(
    learner: Learner, batch: Batch, wanted: Targets, gathered: list[Tensor]
) -> list[RowLosses]:
    options = learner.options
    assert options.loss is not None
    needs_teacher = loss_kind(options.loss).needs_teacher
    given: dict[str, Any] = {
        "labels": batch.ids[wanted.places],
        "teacher": batch.teachers[wanted.teachers] if needs_teacher else None,
        "temperature": options.teacher_temperature,
        "lk_decay": options.lk_decay,
    }
    shared, *own = learner.lm_heads(batch.ids)
    if not own:
        return depth_losses(options.loss, gathered, shared, **given)
    return [
        depth_losses(options.loss, [states], own[min(depth, len(own) - 1)], **given)[0]
        for depth, states in enumerate(gathered)
    ]


def _total(
    learner: Learner,
    gathered: list[Tensor],
    losses: list[RowLosses],
    wanted: Targets,
    num_rows: int,
    counts: Counts,
) -> Tensor:
    """This row's share of the step's loss: a mean over the whole step at each depth.

    The mean is over all labels, also those that a draft vocabulary makes the loss drop: how many
    `kl` drops is only known when the step is over. So such a step weighs as much as it can teach.
    """
    options = learner.options
    if options.loss == "e2e-tv":
        return end_to_end_loss(gathered, losses, wanted.starts, num_rows, max(1, counts.complete))
    assert options.beta is not None
    weights = step_weights(options.beta, options.num_depths)
    shares = [w / max(1, n) for w, n in zip(weights, counts.by_depth, strict=True)]
    return weighted_loss(gathered, losses, wanted.starts, shares, 1.0)


def _sums(total: Tensor, losses: list[RowLosses], wanted: Targets, num_rows: int) -> Sums:
    device = wanted.places.device
    is_right = torch.ones(num_rows + 1, dtype=torch.bool, device=device)
    has_label = is_right.clone()
    loss, matches, chains, kept = [], [], [], []
    for part, starts in zip(losses, wanted.starts, strict=True):
        counts = starts >= 0
        loss.append((part.loss.double() * counts).sum())
        kept.append((part.is_kept & counts).sum())
        # The spare last place takes what has no row.
        place = torch.where(counts, starts, num_rows)
        labelled = torch.zeros_like(has_label).index_put_((place,), counts)
        right = torch.zeros_like(has_label).index_put_((place,), part.is_match & counts)
        has_label, is_right = has_label & labelled, is_right & right
        matches.append((is_right & has_label)[:-1].sum())
        chains.append(has_label[:-1].sum())
    rows = [[*loss, total], *([*each, each[0]] for each in (matches, chains, kept))]
    return Sums(torch.stack([torch.stack([v.double() for v in row]) for row in rows]))
