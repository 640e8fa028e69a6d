"""What each depth is to predict: the off-by-one heart of training, once.

Depth k (from 1) at row t consumes token t + k and predicts token t + k + 1. The loss runs over the
predicted tokens: token j counts where its own mask is set, and depth k predicts it from row
j - k - 1 of the same document. So all depths share one list of labels, and the trunk's
distribution over token j, which its state at j - 1 gives, is formed once for all of them.

A document of tokens 0 1 2 3 4, K = 3; start rows of each label, -1 where there is none:

    label    2   3   4
    depth 1  0   1   2
    depth 2 -1   0   1
    depth 3 -1  -1   0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.models.documents import Documents
from headstart.train.losses.combine import complete_rows
from headstart.train.packing import FIRST_LABEL, Row


@dataclass(frozen=True)
class Targets:
    """Labels of one packed row of T tokens; R labels, K depths."""

    places: Tensor  # [R] where the labels stand
    starts: tuple[Tensor, ...]  # per depth [R]: the row that predicts them, -1: none
    drafting: Tensor  # [N] rows that predict at any depth, ascending

    def to(self, device: torch.device) -> Targets:
        starts = tuple(s.to(device) for s in self.starts)
        return Targets(self.places.to(device), starts, self.drafting.to(device))

    @property
    def teachers(self) -> Tensor:
        """[R] rows whose trunk state chooses the labels."""
        return self.places - 1


def targets(mask: Tensor, documents: Documents, num_depths: int) -> Targets:
    """mask [T] bool: tokens to learn."""
    position = documents.positions(mask.device)
    places = (mask & (position >= FIRST_LABEL)).nonzero().squeeze(-1)
    at = position[places]
    starts = tuple(
        torch.where(at >= depth + 1, places - depth - 1, -1) for depth in range(1, num_depths + 1)
    )
    drafting = torch.cat(starts).unique()
    return Targets(places, starts, drafting[drafting >= 0])


@dataclass(frozen=True)
class Counts:
    """Loss rows of a whole step, over all its packed rows: what losses are divided by."""

    by_depth: tuple[int, ...]
    complete: int  # chains of which every depth has a label


def count(rows: Sequence[Row], num_depths: int) -> Counts:
    """The same on every process, because every process knows the whole step."""
    by_depth, complete = [0] * num_depths, 0
    for row in rows:
        found = targets(row.mask, row.documents, num_depths)
        for depth, starts in enumerate(found.starts):
            by_depth[depth] += int((starts >= 0).sum())
        complete += int(complete_rows(found.starts, row.documents.num_rows).sum())
    return Counts(tuple(by_depth), complete)
