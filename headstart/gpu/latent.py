"""Latent attention through the kernels: what is kept of rows, and how a round's rows attend.

A round's rows are few, so they are compared with the latents themselves; prompts unfold them
(`gpu/latent_prompts.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.kernels.attention import Cut
from headstart.kernels.latent import cut_for, latent_attention
from headstart.kernels.latent_rows import (
    Turn,
    keep_latents,
    lift_queries,
    lower_latents,
    turn_queries,
)
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mla import LatentAttention
from headstart.models.mla_config import LATENT_EPS

Product = Callable[[Tensor, Linear], Tensor]  # x [M, K] -> partial sums [S, M, N]
# a layer's attention, queries [M, H, D], their rotated part turned -> [M, H * V]
LatentAttend = Callable[[LatentAttention, Tensor, LayerCache], Tensor]


def place_latents(
    product: Product, attention: LatentAttention, normed: Tensor, turn: Turn, places: Tensor,
    cache: LayerCache,
) -> Tensor:  # fmt: skip
    """The rows' entries go to the cache; what queries come from, for `finish_queries`."""
    both = product(normed, attention.compress)
    q_norm = None if attention.q_latent_norm is None else attention.q_latent_norm.factor
    kept = keep_latents(
        both, q_norm, attention.kv_latent_norm.factor, LATENT_EPS, turn, places, cache.k
    )
    return both if kept is None else kept


def finish_queries(
    product: Product, attention: LatentAttention, source: Tensor, turn: Turn, dtype: torch.dtype
) -> Tensor:
    """[M, H, D], of what `place_latents` gave."""
    both = source if attention.q_up is None else product(source, attention.q_up)
    return turn_queries(both, attention.heads, attention.config.qk_dim, turn, dtype)


def paged_latent(
    tables: Tensor, seen: Tensor, rows: int, *, block_size: int, max_context: int, first_slot: int
) -> LatentAttend:
    """How `rows` new rows of each request attend over the latents: `latent_attention`."""
    requests = seen.shape[0]

    def attend(attention: LatentAttention, q: Tensor, cache: LayerCache) -> Tensor:
        ups, nope = attention.ups, attention.config.nope_dim
        shape = (requests, rows, attention.heads, -1)
        gathered = latent_attention(
            lift_queries(q, ups, nope).view(shape), q.view(shape), cache.k, tables, seen,
            scale=attention.config.scale, block_size=block_size, max_context=max_context,
            cut=_cut(requests, rows * attention.heads, q.element_size()), first_slot=first_slot,
        )  # fmt: skip
        return lower_latents(gathered.flatten(0, 1), ups, nope).flatten(1)

    return attend


def _cut(requests: int, lines: int, number_bytes: int) -> Cut:
    return cut_for(requests, lines, number_bytes)
