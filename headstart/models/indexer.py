"""Sparse attention: a small indexer says which tokens a row of latent attention may see.

Each token keeps one index key beside its latent. A row scores all keys with a few heads of its
own, and sees the best `top_k` of them. Equal scores go to the earlier token, so what a row sees
does not depend on the rows beside it. No gradient passes through a choice: an indexer is not
trained here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import layer_norm

from headstart.models.attention import Seen
from headstart.models.linear import Linear
from headstart.models.mla_config import LATENT_EPS, IndexConfig
from headstart.models.rope import Rotation, in_halves, rotate

# Scores of all heads at one time. Those of a long prompt would be many gigabytes.
SCORE_VALUES = 1 << 25


class IndexRows(NamedTuple):
    """Queries [T, heads, D] of some rows, and what each head's score weighs [T, heads]."""

    q: torch.Tensor
    weights: torch.Tensor


class Indexer(nn.Module):
    def __init__(self, hidden: int, q_rank: int, config: IndexConfig):
        super().__init__()
        self.config = config
        self.q_up = Linear(q_rank, config.heads * config.dim)
        self.k = Linear(hidden, config.dim)
        self.k_norm_weight = nn.Parameter(torch.empty(config.dim), requires_grad=False)
        self.k_norm_bias = nn.Parameter(torch.empty(config.dim), requires_grad=False)
        self.weights = Linear(hidden, config.heads)
        self.one_by_one = False  # set by backends/torch/exact.py

    @torch.no_grad()
    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation
    ) -> tuple[IndexRows, torch.Tensor]:
        """What rows ask with, and the keys [T, D] that are kept of them."""
        config = self.config
        turn = rotation if config.is_interleaved else in_halves(rotation)
        q = self.q_up(q_latent).view(len(x), config.heads, config.dim)
        k = layer_norm(self.k(x), (config.dim,), self.k_norm_weight, self.k_norm_bias, LATENT_EPS)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = self.weights(x).to(wide) * config.heads**-0.5
        rows = IndexRows(self._turned(q, turn).to(wide) * config.dim**-0.5, weights)
        return rows, self._turned(k.unsqueeze(1), turn).squeeze(1)

    def _turned(self, x: torch.Tensor, turn: Rotation) -> torch.Tensor:
        """x [T, heads, D] with its first or its last numbers rotated."""
        if not self.config.rotates_last:
            return rotate(x, *turn)
        kept = x.shape[-1] - turn.cos.shape[-1]
        return torch.cat([x[..., :kept], rotate(x[..., kept:], *turn)], dim=-1)

    @torch.no_grad()
    def choose(self, rows: IndexRows, part: Seen) -> torch.Tensor | None:
        """Which entries the rows of one text may see, [R, n + C]; None where that is all of them.

        The keys are the last numbers of an entry. So many rows at a time that their scores stay
        small.
        """
        size, kind = self.config.dim, rows.q.dtype
        total = len(part.stored) + (0 if part.own is None else len(part.own))
        if total <= self.config.top_k:
            return None
        stored = part.stored[:, -size:].to(kind)
        own = None if part.own is None else part.own[..., -size:].to(kind)
        before = len(stored) - part.num_rows
        step = max(1, SCORE_VALUES // (self.config.heads * total))
        chosen = torch.empty(part.num_rows, total, dtype=torch.bool, device=stored.device)
        for at in range(0, part.num_rows, step):
            here = slice(at, min(at + step, part.num_rows))
            some = IndexRows(*(each[part.rows][here] for each in rows))
            scores = scores_of(some, "md", stored)
            last = torch.arange(before + here.start, before + here.stop, device=scores.device)
            ahead = torch.arange(len(stored), device=scores.device) > last[:, None]
            scores.masked_fill_(ahead, -torch.inf)
            if own is not None:
                scores = torch.cat([scores, scores_of(some, "mrd", own[:, here])], dim=1)
            chosen[here] = best_of(scores, self.config.top_k)
        return chosen


def scores_of(rows: IndexRows, axes: str, keys: torch.Tensor) -> torch.Tensor:
    """[R, m] for keys with these axes."""
    by_head = torch.einsum(f"rhd,{axes}->rhm", rows.q, keys).relu_()
    return torch.einsum("rhm,rh->rm", by_head, rows.weights)


def best_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Which of scores [R, m] are a row's best so many; never those that it cannot see."""
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return chosen & (scores > -torch.inf)
