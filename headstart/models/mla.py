"""Multi-head latent attention: of a token one latent is kept for all heads, and one rotated key.

Keys and values of a head are linear in the latent. So they need not be unfolded: a query can be
brought into the space of latents instead, and what it gathers there be brought back ("absorbed").
That reads far less memory and is what a few rows do; many rows of a prompt unfold the latents
once and attend as usual. Both give the same numbers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

from headstart.models.attention import EntryContext, Seen
from headstart.models.indexer import Indexer, IndexRows
from headstart.models.linear import Linear
from headstart.models.mla_config import MlaConfig
from headstart.models.norm import Norm
from headstart.models.pooled_indexer import PooledIndexer
from headstart.models.ragged import causal_attention, chained_attention, chosen_attention
from headstart.models.rope import Rotation, rotate
from headstart.models.row_attention import attend_chosen, attend_rows

Chosen = torch.Tensor | None  # which entries each row may see [R, n]; None for all


class LatentAttention(nn.Module):
    """Queries (or their latent) and the entry that is kept come from one product."""

    def __init__(self, hidden: int, heads: int, config: MlaConfig, *, has_indexer: bool = False):
        super().__init__()
        self.heads, self.config = heads, config
        self.indexer = None
        if has_indexer:
            assert config.index is not None and config.q_rank is not None
            kind = Indexer if config.index.pool is None else PooledIndexer
            self.indexer = kind(hidden, config.q_rank, config.index)
        self._chosen: list[Chosen] = []  # by the indexer, for layers that share it in this pass
        self._num_followers = 0
        self._leader: tuple[LatentAttention, ...] = ()
        self._place = 0  # among layers that share the same indexer, from 1
        queries = heads * config.qk_dim
        self.compress = Linear(hidden, (config.q_rank or queries) + config.entry)
        self.q_latent_norm = Norm(config.q_rank, config.eps) if config.q_rank else None
        self.q_up = Linear(config.q_rank, queries) if config.q_rank else None
        self.kv_latent_norm = Norm(config.kv_rank, config.eps)
        # Of each head its rows for keys, then those for values. No `Linear`: absorbing needs the
        # matrix itself, in the model's own type.
        self.kv_up = nn.Parameter(
            torch.empty(heads * (config.nope_dim + config.v_dim), config.kv_rank),
            requires_grad=False,
        )
        self.gate = Linear(hidden, heads * config.gate_dim) if config.is_gated else None
        sinks = torch.empty(heads) if config.has_sinks else None
        self.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)
        self.o = Linear(heads * config.v_dim, hidden)
        self.one_by_one = False  # set by models/exact.py

    def forward(
        self, x: torch.Tensor, rotation: Rotation, context: EntryContext, window: int | None = None
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        assert window is None, "no family has latent attention with a window"
        q, entries, index = self._project(x, rotation)
        parts = self._choose(index, context.seen(entries))
        few = [part for part in parts if self._is_few(part[0])]
        found = self._absorbed(q, few) if few else q.new_zeros(*q.shape[:2], self.config.v_dim)
        for part, allowed in parts:
            if not self._is_few(part):
                found[part.rows] = self._unfolded(q[part.rows], part, allowed)
        if self.gate is not None:
            gates = self.gate(x).sigmoid().view(len(x), self.heads, self.config.gate_dim)
            found = found * gates
        result = self.o(found.flatten(1))
        assert isinstance(result, torch.Tensor)
        return result

    def follow(self, leader: LatentAttention) -> None:
        """See what the indexer of an earlier layer chose in the same pass."""
        self._leader = (leader,)  # in a tuple, or its weights would count as this layer's
        leader._num_followers += 1
        self._place = leader._num_followers

    @property
    def is_sparse(self) -> bool:
        """Whether rows see a choice of entries, by its own indexer or an earlier layer's."""
        return self.indexer is not None or bool(self._leader)

    def _choose(self, index: IndexRows | None, seen: list[Seen]) -> list[tuple[Seen, Chosen]]:
        """With each text's rows which entries they may see; None for all."""
        if self.indexer is not None and index is not None:
            chosen = [self.indexer.choose(index, part) for part in seen]
            self._chosen = chosen if self._num_followers else []
        elif self._leader:
            leader = self._leader[0]
            chosen = leader._chosen
            if self._place == leader._num_followers:
                leader._chosen = []  # a byte for every row and entry, not needed any more
        else:
            return [(part, None) for part in seen]
        # The index keys have done their work.
        entry = self.config.entry
        own = [None if part.own is None else part.own[..., :entry] for part in seen]
        bare = [
            Seen(part.rows, part.stored[:, :entry], each)
            for part, each in zip(seen, own, strict=True)
        ]
        return list(zip(bare, chosen, strict=True))

    def _is_few(self, part: Seen) -> bool:
        return part.own is None and part.num_rows <= self.config.few_rows

    def _project(
        self, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, IndexRows | None]:
        """Queries [T, heads, nope + rope], scaled, and the rows' entries [T, kv_rank + rope].

        With an indexer also what it asks with; its keys end the entries.
        """
        config, both = self.config, self.compress(x)
        q, latent, key = torch.split(
            both, [both.shape[1] - config.entry, config.kv_rank, config.rope_dim], dim=-1
        )
        index, kept = None, []
        if self.q_up is not None and self.q_latent_norm is not None:
            q_latent = self.q_latent_norm(q)
            q = self.q_up(q_latent)
            if self.indexer is not None:
                index, index_key = self.indexer.project(x, q_latent, rotation)
                kept = [index_key]
        q = q.reshape(len(x), self.heads, -1)
        turned = rotate(q[..., config.nope_dim :], *rotation)
        # Attention divides by the root of a query's size; here scores have a scale of their
        # own, and the size is another one where queries are absorbed.
        q = torch.cat([q[..., : config.nope_dim], turned], dim=-1) * config.scale
        key = rotate(key.unsqueeze(1), *rotation).squeeze(1)
        return q, torch.cat([self.kv_latent_norm(latent), key, *kept], dim=-1), index

    @property
    def ups(self) -> torch.Tensor:
        """What unfolds a latent into keys, then values: [heads, nope + v, rank]."""
        return self.kv_up.view(self.heads, -1, self.config.kv_rank)

    def _absorbed(self, q: torch.Tensor, seen: list[tuple[Seen, Chosen]]) -> torch.Tensor:
        """[T, heads, v]; rows outside `seen` mean nothing."""
        config = self.config
        for_keys, for_values = torch.split(self.ups, [config.nope_dim, config.v_dim], dim=1)
        lifted = self._by_head(q[..., : config.nope_dim], for_keys)
        q = torch.cat([lifted, q[..., config.nope_dim :]], dim=-1) * config.entry**0.5
        gathered = q.new_zeros(*q.shape[:2], config.kv_rank)
        for part, allowed in seen:
            keys = part.stored.unsqueeze(1)
            values, mine = keys[..., : config.kv_rank], q[part.rows]
            if allowed is None:
                gathered[part.rows] = attend_rows(mine, keys, values, sinks=self.sinks)
            else:
                gathered[part.rows] = attend_chosen(mine, keys, values, allowed, self.sinks)
        return self._by_head(gathered, for_values.transpose(1, 2))

    def _by_head(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """x [T, heads, m] through [heads, m, n] -> [T, heads, n]."""
        rows = torch.split(x, 1) if self.one_by_one else (x,)
        return torch.cat([torch.einsum("thm,hmn->thn", part, matrices) for part in rows])

    def _unfolded(self, q: torch.Tensor, part: Seen, allowed: Chosen) -> torch.Tensor:
        """q [R, heads, nope + rope] -> [R, heads, v]."""
        wide = max(self.config.qk_dim, self.config.v_dim)
        q = pad(q * wide**0.5, (0, wide - q.shape[-1]))
        keys, values = self._unfold(part.stored)
        sinks = self.sinks
        if part.own is not None:
            own = self._unfold(part.own)
            if allowed is None:
                result = chained_attention(q, keys, values, *own, (len(q),), sinks=sinks)
            else:
                result = chosen_attention(q, keys, values, *own, allowed, sinks)
        elif allowed is not None:
            result = attend_chosen(q, keys, values, allowed, sinks)
        elif len(q) == len(keys):
            result = causal_attention(q, keys, values, (len(q),), sinks=sinks)
        else:
            result = attend_rows(q, keys, values, sinks=sinks)
        return result[..., : self.config.v_dim]

    def _unfold(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries [..., E] -> keys and values [..., heads, D].

        The smaller ones are filled up with zeros: fused attention wants both of one size.
        """
        config = self.config
        latents, key = torch.split(entries, [config.kv_rank, config.rope_dim], dim=-1)
        both = (latents @ self.kv_up.t()).view(*entries.shape[:-1], self.heads, -1)
        keys, values = torch.split(both, [config.nope_dim, config.v_dim], dim=-1)
        shared = key.unsqueeze(-2).expand(*keys.shape[:-1], -1)
        wide = max(config.qk_dim, config.v_dim)
        keys = pad(torch.cat([keys, shared], dim=-1), (0, wide - config.qk_dim))
        return keys, pad(values, (0, wide - config.v_dim))
