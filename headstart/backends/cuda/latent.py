"""Latent attention through the kernels: what is kept of rows, and how a round's rows attend.

A round's rows are few, so they are compared with the latents themselves; prompts unfold them
(`backends/cuda/prompts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.backends.cuda.kernels.latent import cut_for, latent_attention
from headstart.backends.cuda.kernels.latent_heads import lift_queries, lower_latents
from headstart.backends.cuda.kernels.latent_rows import Turn, keep_latents, turn_queries
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

    def of(self, rows: Tensor) -> Queries:
        """Those of some rows."""
        turn = replace(self.turn, positions=self.turn.positions[rows])
        return Queries(self.attention, self.partial[:, rows], turn)

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
    """The rows' entries go to the cache; what queries come from, for `queries_of`."""
    both = product(normed, attention.compress)
    q_norm = None if attention.q_latent_norm is None else attention.q_latent_norm.factor
    kept = keep_latents(
        both, q_norm, attention.kv_latent_norm.factor, LATENT_EPS, turn, kv_slots, cache.k
    )
    return both if kept is None else kept


def queries_of(product: Product, attention: LatentAttention, source: Tensor, turn: Turn) -> Queries:
    """Of what `place_latents` gave."""
    both = source if attention.q_up is None else product(source, attention.q_up)
    return Queries(attention, both, turn)


def paged_latent(
    tables: Tensor, seen: Tensor, rows: int, *, block_size: int, max_context: int, first_slot: int
) -> LatentAttend:
    """How `rows` new rows of each request attend over the latents: `latent_attention`."""
    requests = seen.shape[0]

    def attend(queries: Queries, cache: LayerCache) -> Tensor:
        attention, config = queries.attention, queries.attention.config
        ups, nope = attention.ups, config.nope_dim
        lifted, turned = (
            part.view(requests, rows, attention.heads, -1)
            for part in lift_queries(queries.partial, ups, nope, queries.turn)
        )
        gathered = latent_attention(
            lifted, turned, cache.k, tables, seen, scale=config.scale, block_size=block_size,
            max_context=max_context, first_slot=first_slot,
            cut=cut_for(requests, rows * attention.heads, cache.k.element_size()),
        )  # fmt: skip
        return lower_latents(gathered.flatten(0, 1), ups, nope).flatten(1)

    return attend
