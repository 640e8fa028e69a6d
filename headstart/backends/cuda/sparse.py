"""Sparse attention through the kernels: an indexer's rows, and what they choose.

A layer with an indexer chooses; layers after it that have none see the same entries. A choice is a
list of slots for each row, so attention over it is that of requests with one row each, whose blocks
have one slot: it reads as many entries as were chosen, however long the context is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headstart.backends.cuda.kernels.index_choice import Texts, choose_entries, index_scores
from headstart.backends.cuda.kernels.index_rows import index_queries, keep_index
from headstart.backends.cuda.kernels.latent_rows import Turn
from headstart.models.indexer import Indexer
from headstart.models.linear import Linear
from headstart.models.mla_config import LATENT_EPS

Product = Callable[[Tensor, Linear], Tensor]  # x [M, K] -> partial sums [S, M, N]


@dataclass(frozen=True)
class IndexQueries:
    """What M rows ask an indexer's keys with: queries [M, H, D], weights of heads [M, H]."""

    q: Tensor
    weights: Tensor

    def of(self, rows: Tensor) -> IndexQueries:
        """Those of some rows."""
        return IndexQueries(self.q[rows], self.weights[rows])


def keep_index_keys(
    product: Product, indexer: Indexer, x: Tensor, turn: Turn, kv_slots: Tensor, keys: Tensor
) -> None:
    """The rows' index keys go to the cache [slots, D]."""
    config = indexer.config
    keep_index(
        product(x, indexer.k), (indexer.k_norm_weight, indexer.k_norm_bias), LATENT_EPS, turn,
        kv_slots, keys, is_interleaved=config.is_interleaved and turn.is_interleaved,
        rotates_last=config.rotates_last,
    )  # fmt: skip


def index_rows(
    product: Product, indexer: Indexer, x: Tensor, q_latent: Tensor, turn: Turn
) -> IndexQueries:
    """What rows ask with; q_latent: what their queries come from."""
    config = indexer.config
    q, weights = index_queries(
        product(q_latent, indexer.q_up), product(x, indexer.weights), config.heads, turn, x.dtype,
        is_interleaved=config.is_interleaved and turn.is_interleaved,
        rotates_last=config.rotates_last,
    )  # fmt: skip
    return IndexQueries(q, weights)


class Choices:
    """What the last indexer of a pass chose for some rows: later layers may share it."""

    def __init__(self) -> None:
        self._last: Texts | None = None

    def of(
        self, index: IndexQueries | None, keys: Tensor, texts: Texts, top_k: int, lines: int
    ) -> Texts:
        """What each of `lines` rows sees, as texts of one row; without `index` what was chosen.

        texts.rows times its requests may be more than `lines`: the last ones are blank.
        """
        if index is not None:
            scores = index_scores(index.q, index.weights, keys, texts, top_k)
            chosen, last = choose_entries(scores, texts, top_k, lines)
            self._last = Texts(chosen, last, 1, 1, top_k)
        assert self._last is not None, "an indexer comes before those that share it"
        return self._last
