"""Grouped attention to a choice of tokens: K, V and an index key are one entry of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.models.attention import EntryContext, Seen
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.grouped_attention import Attention
from headstart.models.pooled_indexer import MeanIndexer
from headstart.models.ragged import causal_attention, chained_attention, chosen_attention
from headstart.models.rope import Rotation
from headstart.models.row_attention import attend_chosen, attend_rows


class IndexedAttention(Attention):
    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__(config, config.shape(kind))
        assert config.index is not None
        self.indexer = MeanIndexer(config.hidden, config.index, config.rope, config.eps)

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, context: EntryContext, window: int | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        assert window is None, "no family has a choice of tokens with a window"
        q, k, v, gate = self.project(x, rotation)
        asked, key = self.indexer.project(x, rotation)
        found = q.new_zeros(*q.shape[:2], self.v_dim)
        for part in context.seen(torch.cat([k.flatten(1), v.flatten(1), key], dim=-1)):
            found[part.rows] = self._attend(q[part.rows], part, self.indexer.choose(asked, part))
        return self.finish(x, found.flatten(1), gate)

    def _attend(self, q: Tensor, part: Seen, allowed: Tensor | None) -> Tensor:
        """q [R, heads, D] -> [R, heads, D of values]."""
        keys, values = self._unpacked(part.stored)
        if part.own is not None:
            own = self._unpacked(part.own)
            if allowed is None:
                return chained_attention(q, keys, values, *own, (len(q),))
            return chosen_attention(q, keys, values, *own, allowed)
        if allowed is not None:
            group = self.heads // self.kv_heads
            keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
            return attend_chosen(q, keys, values, allowed)
        if len(q) == len(keys):
            return causal_attention(q, keys, values, (len(q),))
        return attend_rows(q, keys, values)

    def _unpacked(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Entries [..., E] -> keys and values [..., kv_heads, D]."""
        sizes = [self.kv_heads * self.dim, self.kv_heads * self.v_dim]
        keys, values, _ = torch.split(entries, [*sizes, entries.shape[-1] - sum(sizes)], dim=-1)
        return keys.unflatten(-1, (self.kv_heads, -1)), values.unflatten(-1, (self.kv_heads, -1))
