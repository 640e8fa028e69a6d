"""The frozen LM head as the losses see it: all rows for the trunk, rows of S for the draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.errors import DataError


@dataclass(frozen=True)
class LmHead:
    """weight [V, D]; with a draft vocabulary also its rows [S, D], made once and kept.

    Without a draft vocabulary `draft_weight` is `weight`, not a copy. A module may have an LM head
    of its own: then `draft_weight` is of that one, and `taught_weight` the trunk's rows of S.
    """

    weight: Tensor
    draft_weight: Tensor
    vocab_ids: Tensor | None = None  # [S] original ids, ascending
    draft_index: Tensor | None = None  # [V] place of an original id in S, -1 outside
    trunk_rows: Tensor | None = None  # [S, D] of the trunk, where the draft has others
    own_weight: Tensor | None = None  # [V, D] of the draft, where it has others

    @classmethod
    def of(
        cls, weight: Tensor, vocab_ids: Tensor | None = None, own: Tensor | None = None
    ) -> LmHead:
        """weight and own [V, D], detached; vocab_ids [S] unique original ids.

        Waits for the device once.
        """
        weight = weight.detach()
        own = None if own is None else own.detach()
        drafts = weight if own is None else own
        if vocab_ids is None:
            taught = None if own is None else weight
            return cls(weight, drafts, trunk_rows=taught, own_weight=own)
        ids = vocab_ids.to(weight.device, torch.int64)
        size = weight.shape[0]
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (-1, -1)
        if low < 0 or high >= size:
            raise DataError(
                f"the draft vocabulary has {len(ids)} ids, from {low} to {high}; expected ids from "
                f"0 to {size - 1}, the rows of the LM head. Make it for this model with "
                f"`headstart vocab`."
            )
        index = torch.full((size,), -1, dtype=torch.int64, device=weight.device)
        index[ids] = torch.arange(len(ids), device=weight.device)
        taught = None if own is None else weight[ids]
        return cls(weight, drafts[ids], ids, index, taught, own)

    def beside(self, ids: Tensor) -> LmHead:
        """The same with the rows of these tokens, too, of which any may come more than once."""
        if self.vocab_ids is None:
            return self
        joined = torch.cat([self.vocab_ids, ids.to(self.vocab_ids.device, torch.int64)])
        return self.of(self.weight, joined.unique(), self.own_weight)

    @property
    def taught_weight(self) -> Tensor:
        """The trunk's rows of S."""
        return self.draft_weight if self.trunk_rows is None else self.trunk_rows

    @property
    def wide(self) -> torch.dtype:
        """What soft-max and sums are computed in: fp32, or fp64 where the weights are."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def place_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of `draft_weight` for labels [n] (0 outside S), and whether each is in S."""
        if self.draft_index is None:
            return labels, torch.ones_like(labels, dtype=torch.bool)
        place = self.draft_index[labels]
        return place.clamp_min(0), place >= 0

    def has_draft(self, ids: Tensor) -> Tensor:
        """Whether each original id is in the draft vocabulary."""
        if self.draft_index is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return self.draft_index[ids] >= 0

    def original_ids(self, places: Tensor) -> Tensor:
        """Original ids of rows of `draft_weight`."""
        return places if self.vocab_ids is None else self.vocab_ids[places]
