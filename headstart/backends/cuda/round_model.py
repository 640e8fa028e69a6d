"""What a round runs: weights, K/V memory, and the LM heads that draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.backends.cuda.forward import Kernels, Rows
from headstart.backends.cuda.kernels.own_rows import OwnSlots
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import LayerStates
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class DraftTokens:
    """What drafts are chosen among."""

    lm_heads: tuple[Linear, ...]  # N outputs each: one for all modules of a head, or one for each
    ids: Tensor | None = None  # [N] where the draft vocabulary is reduced,
    columns: Tensor | None = None  # and [V] where it has each token, -1: nowhere

    @classmethod
    def of(cls, lm_heads: Sequence[Linear], ids: Tensor | None, vocab: int) -> DraftTokens:
        """`vocab`: tokens that the trunk chooses among."""
        if ids is None:
            return cls(tuple(lm_heads))
        columns = torch.empty(vocab, dtype=torch.int32, device=ids.device)
        found = cls(tuple(lm_heads), ids, columns)
        found.ids_changed()
        return found

    def ids_changed(self) -> None:
        """Other ids were written into the same memory: so are their columns."""
        if self.ids is None or self.columns is None:
            return
        self.columns.fill_(-1)
        self.columns[self.ids] = torch.arange(
            len(self.ids), dtype=torch.int32, device=self.ids.device
        )

    def columns_with(self, own: OwnSlots | None) -> Tensor | None:
        """`columns`, where requests have own tokens behind them [B, V]."""
        if own is None or self.ids is None or self.columns is None:
            return self.columns
        slots = torch.arange(own.limit, device=own.ids.device, dtype=torch.int32)
        is_used = slots < own.counts[:, None]
        # What is not in use goes to a place behind all tokens.
        places = torch.where(is_used, own.ids, len(self.columns)).long()
        wide = pad(self.columns, (0, 1)).repeat(len(places), 1)
        wide.scatter_(1, places, (len(self.ids) + slots).expand_as(own.ids))
        return wide[:, :-1].contiguous()

    def lm_head(self, depth: int) -> Linear:
        """The one that drafts at `depth`, from 1."""
        return self.lm_heads[min(depth, len(self.lm_heads)) - 1]


@dataclass(frozen=True)
class RoundModel:
    trunk: Trunk
    head: MTPHead | None
    caches: list[LayerCache]
    head_caches: list[LayerCache]  # by module
    boundary: Tensor  # [blocks, modules, D]: the states that the slot after each block needs
    block_size: int
    drafting: list[DraftTokens]  # by number, as requests ask for them
    max_context: int
    feeds_stream: bool = field(kw_only=True)  # the head, with what comes before the final norm
    kernels: Kernels = field(default_factory=Kernels)
    states: list[LayerStates] = field(default_factory=list)  # of the recurrent layers
    # [V, D] of whole LM heads, for tokens beside a vocabulary: one, or one for each module.
    own_rows: tuple[Tensor, ...] = ()

    def own_rows_of(self, depth: int) -> Tensor:
        """Of the LM head that drafts at `depth`, from 1."""
        return self.own_rows[min(depth, len(self.own_rows)) - 1]

    def rows(
        self, placed: tuple[Tensor, Tensor, Tensor], tables: Tensor, rows: int, *, first_slot: int
    ) -> Rows:
        """`rows` new rows of each request: positions, slots of the cache, slots seen."""
        positions, kv_slots, seen = placed
        own: dict[str, int] = {
            "block_size": self.block_size, "max_context": self.max_context,
            "first_slot": first_slot,
        }  # fmt: skip
        attend = self.kernels.paged(tables, seen, rows, **own)
        latent = self.kernels.paged_latent(tables, seen, rows, **own)
        return Rows(positions, kv_slots, attend, latent=latent)
