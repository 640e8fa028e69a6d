"""Latent attention through the kernels: what is kept of rows, and how a round's rows attend.

A round's rows are few, so they are compared with the latents themselves; prompts unfold them
(`backends/cuda/prompts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.index_choice import Texts
from headstart.backends.cuda.kernels.latent import cut_for, latent_attention
from headstart.backends.cuda.kernels.latent_heads import lift_queries, lower_latents
from headstart.backends.cuda.kernels.latent_rows import Turn, keep_latents, turn_queries
from headstart.backends.cuda.sparse import Choices, IndexQueries, index_rows, keep_index_keys
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mla import LatentAttention
from headstart.models.mla_config import LATENT_EPS

Product = Callable[[Tensor, Linear], Tensor]  # x [M, K] -> partial sums [S, M, N]


@dataclass(frozen=True)
class Queries:
    """Queries of M rows in a layer, not finished: a product, and how its rotated part is turned."""

    attention: LatentAttention
    partial: Tensor  # [S, M, H (N + P) ...]
    turn: Turn
    index: IndexQueries | None = None  # of a layer with an indexer

    def of(self, rows: Tensor) -> Queries:
        """Those of some rows."""
        turn = replace(self.turn, positions=self.turn.positions[rows])
        index = None if self.index is None else self.index.of(rows)
        return Queries(self.attention, self.partial[:, rows], turn, index)

    def finished(self, dtype: torch.dtype) -> Tensor:
        """[M, H, N + P]."""
        attention = self.attention
        return turn_queries(
            self.partial, attention.heads, attention.config.qk_dim, self.turn, dtype
        )


LatentAttend = Callable[[Queries, LayerCache], Tensor]  # [M, H * V]


def place_latents(
    product: Product, attention: LatentAttention, normed: Tensor, turn: Turn, kv_slots: Tensor,
    cache: LayerCache,
) -> Tensor:  # fmt: skip
    """The rows' entries go to the cache, and keys of an indexer; what queries come from."""
    both = product(normed, attention.compress)
    q_norm = None if attention.q_latent_norm is None else attention.q_latent_norm.factor
    kept = keep_latents(
        both, q_norm, attention.kv_latent_norm.factor, LATENT_EPS, turn, kv_slots, cache.k
    )
    if attention.indexer is not None:
        keep_index_keys(product, attention.indexer, normed, turn, kv_slots, cache.v)
    return both if kept is None else kept


def queries_of(
    product: Product, attention: LatentAttention, normed: Tensor, source: Tensor, turn: Turn
) -> Queries:
    """Of rows, and of what `place_latents` gave for them."""
    both = source if attention.q_up is None else product(source, attention.q_up)
    index = None
    if attention.indexer is not None:
        index = index_rows(product, attention.indexer, normed, source, turn)
    return Queries(attention, both, turn, index)


def paged_latent(
    tables: Tensor, seen: Tensor, rows: int, *, block_size: int, max_context: int, first_slot: int
) -> LatentAttend:
    """How `rows` new rows of each request attend over the latents: `latent_attention`."""
    requests = seen.shape[0]
    texts = Texts(tables, seen, rows, block_size, max_context, first_slot)
    choices = Choices()

    def attend(queries: Queries, cache: LayerCache) -> Tensor:
        top_k = sees_at_most(queries.attention)
        if top_k is not None and top_k < max_context:
            chosen = choices.of(queries.index, cache.v, texts, top_k, requests * rows)
            return attend_latents(queries, cache, chosen)
        return attend_latents(queries, cache, texts)

    return attend


def sees_at_most(attention: LatentAttention) -> int | None:
    """Entries that a row sees by a choice; None: all."""
    index = attention.config.index
    return index.top_k if index is not None and attention.is_sparse else None


def attend_latents(
    queries: Queries, cache: LayerCache, texts: Texts, cut: Cut | None = None
) -> Tensor:
    """What rows see of `texts`, [M, H * V]."""
    attention, config, requests = queries.attention, queries.attention.config, len(texts.seen)
    ups, nope = attention.ups, config.nope_dim
    lifted, turned = (
        part.view(requests, texts.rows, attention.heads, -1)
        for part in lift_queries(queries.partial, ups, nope, queries.turn)
    )
    lines = texts.rows * attention.heads
    gathered = latent_attention(
        lifted, turned, cache.k, texts.tables, texts.seen, scale=config.scale,
        block_size=texts.block_size, max_context=texts.max_context, first_slot=texts.first_slot,
        cut=cut or cut_for(requests, lines, cache.k.element_size()),
    )  # fmt: skip
    return lower_latents(gathered.flatten(0, 1), ups, nope).flatten(1)
