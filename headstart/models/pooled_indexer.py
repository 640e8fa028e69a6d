"""Indexers over pooled keys (GLM-5.3-Flash, Qwen3.8-Flash-Next): a row chooses pools of tokens.

Tokens are pooled by their place in the text, and each complete pool has one key. A row scores the
pools that are complete up to it and sees all tokens of the best ones, and the tokens behind the
last complete pool in any case. What is kept of a token is enough to make the keys of pools when a
row asks, so that nothing is kept of pools.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headstart.models.attention import Seen
from headstart.models.indexer import SCORE_VALUES, Indexer, IndexRows, best_of, scores_of
from headstart.models.linear import Linear
from headstart.models.mla_config import IndexConfig
from headstart.models.norm import Norm
from headstart.models.rope import RopeConfig, Rotation, rotate, shared_table

# What is kept of a pool's tokens [..., pool, kept], and the pools' first places [...] -> keys
Pooling = Callable[[Tensor, Tensor], Tensor]


class PooledIndexer(Indexer):
    """Of every token a key and a gate are kept. A pool's key is the mean of its tokens', weighed by
    a soft-max of their gates, channel by channel."""

    def __init__(self, hidden: int, q_rank: int, config: IndexConfig):
        super().__init__(hidden, q_rank, config)
        assert config.pool is not None
        self.pool_gate = nn.Parameter(torch.empty(config.dim, hidden), requires_grad=False)
        self.pool_bias = nn.Parameter(torch.empty(config.pool, config.dim), requires_grad=False)

    @torch.no_grad()
    def project(self, x: Tensor, q_latent: Tensor, rotation: Rotation) -> tuple[IndexRows, Tensor]:
        """What rows ask with, and the keys and gates [T, 2 D] that are kept of them."""
        rows, keys = super().project(x, q_latent, rotation)
        parts = torch.split(x, 1) if self.one_by_one else (x,)
        gates = torch.cat([part @ self.pool_gate.t() for part in parts])
        return rows, torch.cat([keys, gates], dim=-1)

    @torch.no_grad()
    def choose(self, rows: IndexRows, part: Seen) -> Tensor | None:
        return choose_pools(rows, part, self.config, self._pooled)

    def _pooled(self, entries: Tensor, firsts: Tensor) -> Tensor:
        keys, gates = entries.chunk(2, dim=-1)
        shares = (gates + self.pool_bias.to(gates.dtype)).softmax(dim=-2)
        return (shares * keys).sum(dim=-2)


class MeanIndexer(nn.Module):
    """Of every token a key is kept. A pool's key is the mean of its tokens', normed and rotated by
    the place of the first of them."""

    def __init__(self, hidden: int, config: IndexConfig, rope: RopeConfig, eps: float):
        super().__init__()
        self.config, self.rope = config, rope
        self.qk = Linear(hidden, (config.heads + 1) * config.dim)
        self.q_norm = Norm(config.dim, eps, centred=True)
        self.k_norm = Norm(config.dim, eps, centred=True)

    @torch.no_grad()
    def project(self, x: Tensor, rotation: Rotation) -> tuple[IndexRows, Tensor]:
        """What rows ask with, and the keys [T, D] that are kept of them."""
        config = self.config
        both = self.qk(x).view(len(x), config.heads + 1, config.dim)
        q = rotate(self.q_norm(both[:, :-1]), *rotation)
        wide = q.to(torch.promote_types(q.dtype, torch.float32)) * config.dim**-0.5
        return IndexRows(wide, wide.new_ones(wide.shape[:2])), both[:, -1]

    @torch.no_grad()
    def choose(self, rows: IndexRows, part: Seen) -> Tensor | None:
        """Which entries the rows of one text may see, [R, n + C]; None where that is all."""
        return choose_pools(rows, part, self.config, self._pooled)

    def _pooled(self, entries: Tensor, firsts: Tensor) -> Tensor:
        keys = self.k_norm(entries.mean(dim=-2).to(self.k_norm.weight.dtype))
        places = int(firsts.max()) + 1 if firsts.numel() else 1
        table = shared_table(self.rope, places, keys.dtype, keys.device)
        turned = rotate(keys.flatten(0, -2).unsqueeze(1), *table.at(firsts.flatten()))
        return turned.view(keys.shape).to(entries.dtype)


def choose_pools(
    rows: IndexRows, part: Seen, config: IndexConfig, pooled: Pooling
) -> Tensor | None:
    """Which entries the rows of one text may see, [R, n + C]; None where that is all of them.

    What an indexer keeps ends an entry. A row's own entries go on where its stored ones end, inside
    a pool or not.
    """
    kind, pool = rows.q.dtype, config.pool
    assert pool is not None
    own = None if part.own is None else part.own[..., -config.kept :].to(kind)
    total = len(part.stored) + (0 if own is None else len(own))
    if total <= config.top_k:
        return None
    stored = part.stored[:, -config.kept :].to(kind)
    whole = len(stored) // pool
    firsts = torch.arange(whole, device=stored.device) * pool
    keys = pooled(stored[: whole * pool].unflatten(0, (whole, pool)), firsts)
    step = max(1, SCORE_VALUES // (config.heads * total))
    chosen = torch.empty(part.num_rows, total, dtype=torch.bool, device=stored.device)
    before = len(stored) - part.num_rows
    for at in range(0, part.num_rows, step):
        here = slice(at, min(at + step, part.num_rows))
        some = IndexRows(*(each[part.rows][here] for each in rows))
        last = torch.arange(before + here.start, before + here.stop, device=stored.device)
        mine = None if own is None else own[:, here]
        chosen[here] = _chosen(some, keys, stored, mine, last, config, pooled)
    return chosen


def _chosen(
    rows: IndexRows, keys: Tensor, stored: Tensor, own: Tensor | None, last: Tensor,
    config: IndexConfig, pooled: Pooling,
) -> Tensor:  # fmt: skip
    """[R, n + C]; `last` [R] are the places of the rows' own stored entries."""
    pool, device = config.pool or 1, stored.device
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
        more = pooled(entries.unflatten(1, (further, pool)), used[:, ::pool])
        complete = is_there[:, pool - 1 : further * pool : pool]
        found = scores_of(rows, "rmd", more).masked_fill_(~complete, -torch.inf)
        scores = torch.cat([scores, found], dim=1)
    best = best_of(scores, config.top_k // pool)
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
