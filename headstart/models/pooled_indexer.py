"""An indexer over pooled keys (GLM-5.3-Flash): a row chooses whole pools of tokens.

Of every token a key and a gate are kept. Tokens are pooled by place: each complete pool has one
key, the mean of its tokens' weighed by a soft-max of their gates, channel by channel. A row scores
the pools that are complete up to it and sees all tokens of the best ones, and the tokens behind the
last complete pool in any case.
"""

from __future__ import annotations

import torch
from torch import nn

from headstart.models.attention import Seen
from headstart.models.indexer import SCORE_VALUES, Indexer, IndexRows, best_of, scores_of
from headstart.models.mla_config import IndexConfig
from headstart.models.rope import Rotation


class PooledIndexer(Indexer):
    def __init__(self, hidden: int, q_rank: int, config: IndexConfig):
        super().__init__(hidden, q_rank, config)
        assert config.pool is not None
        self.pool = config.pool
        self.pool_gate = nn.Parameter(torch.empty(config.dim, hidden), requires_grad=False)
        self.pool_bias = nn.Parameter(torch.empty(config.pool, config.dim), requires_grad=False)

    @torch.no_grad()
    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation
    ) -> tuple[IndexRows, torch.Tensor]:
        """What rows ask with, and the keys and gates [T, 2 D] that are kept of them."""
        rows, keys = super().project(x, q_latent, rotation)
        parts = torch.split(x, 1) if self.one_by_one else (x,)
        gates = torch.cat([part @ self.pool_gate.t() for part in parts])
        return rows, torch.cat([keys, gates], dim=-1)

    @torch.no_grad()
    def choose(self, rows: IndexRows, part: Seen) -> torch.Tensor | None:
        """Which entries the rows of one text may see, [R, n + C]; None where that is all of them.

        A row's own entries go on where its stored ones end, inside a pool or not.
        """
        config, kind = self.config, rows.q.dtype
        own = None if part.own is None else part.own[..., -config.kept :].to(kind)
        count = 0 if own is None else len(own)
        total = len(part.stored) + count
        if total <= config.top_k:
            return None
        stored = part.stored[:, -config.kept :].to(kind)
        whole = len(stored) // self.pool
        keys = self._pooled(stored[: whole * self.pool].unflatten(0, (whole, self.pool)))
        step = max(1, SCORE_VALUES // (config.heads * total))
        chosen = torch.empty(part.num_rows, total, dtype=torch.bool, device=stored.device)
        before = len(stored) - part.num_rows
        for at in range(0, part.num_rows, step):
            here = slice(at, min(at + step, part.num_rows))
            some = IndexRows(*(each[part.rows][here] for each in rows))
            last = torch.arange(before + here.start, before + here.stop, device=stored.device)
            mine = None if own is None else own[:, here]
            chosen[here] = self._chosen(some, keys, stored, mine, last)
        return chosen

    def _pooled(self, entries: torch.Tensor) -> torch.Tensor:
        """Keys and gates [..., pool, 2 D] -> keys [..., D]."""
        keys, gates = entries.chunk(2, dim=-1)
        shares = (gates + self.pool_bias.to(gates.dtype)).softmax(dim=-2)
        return (shares * keys).sum(dim=-2)

    def _chosen(
        self,
        rows: IndexRows,
        keys: torch.Tensor,
        stored: torch.Tensor,
        own: torch.Tensor | None,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """[R, n + C]; `last` [R] are the places of the rows' own stored entries."""
        pool, device = self.pool, stored.device
        count = 0 if own is None else len(own)
        # What lies behind the last complete pool of stored entries, and goes on with own ones.
        begins = (last + 1) // pool * pool
        places = begins[:, None] + torch.arange(pool - 1 + count, device=device)
        is_stored, is_there = places <= last[:, None], places <= last[:, None] + count
        scores = scores_of(rows, "md", keys)
        ends = torch.arange(1, len(keys) + 1, device=device) * pool - 1
        scores.masked_fill_(ends > last[:, None], -torch.inf)
        further = (pool - 1 + count) // pool  # pools that own entries may complete
        if own is not None and further:
            used = places[:, : further * pool]
            mine = (used - last[:, None] - 1).clamp(0, count - 1)
            row = torch.arange(len(last), device=device)[:, None]
            entries = torch.where(
                is_stored[:, : further * pool, None],
                stored[used.clamp_max(len(stored) - 1)],
                own[mine, row],
            )
            pooled = self._pooled(entries.unflatten(1, (further, pool)))
            more = scores_of(rows, "rmd", pooled)
            complete = is_there[:, pool - 1 : further * pool : pool]
            scores = torch.cat([scores, more.masked_fill_(~complete, -torch.inf)], dim=1)
        best = best_of(scores, self.config.top_k // pool)
        seen = torch.zeros(len(last), len(stored) + count + 1, dtype=torch.bool, device=device)
        seen[:, : len(keys) * pool] = best[:, : len(keys)].repeat_interleave(pool, dim=1)
        tail = (last + 1 - begins + count) // pool * pool  # where no pool is complete any more
        near = torch.arange(pool - 1 + count, device=device) >= tail[:, None]
        if further:
            inside = best[:, len(keys) :].repeat_interleave(pool, dim=1)
            near[:, : inside.shape[1]] |= inside
        columns = torch.where(is_stored, places, len(stored) + places - last[:, None] - 1)
        columns = columns.masked_fill(~is_there, len(stored) + count)  # dropped below
        seen.scatter_(1, columns, near)
        return seen[:, :-1]
