"""Columns of logits for the tokens that texts have beside a draft vocabulary, open where they are.

Rows of several texts are scored together, so there is a column for each token that is any text's
own, and at a row those of its own text that are not among its last are closed: their logits are
-inf, which is no candidate. The rule is the engine's (`vocab/own_tokens.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.vocab.own_tokens import OwnRule


@dataclass(frozen=True)
class OwnColumns:
    """N columns of a list and of E own tokens, all in the order of their ids."""

    ids: Tensor  # [N]
    extra: Tensor  # [E] the own tokens, rising
    _places: Tensor  # [E] their columns
    _spans: Tensor  # [3, S]: which of them, from which row on, up to which

    @classmethod
    def of(
        cls, rule: OwnRule, listed: Tensor, texts: Sequence[tuple[int, Sequence[int]]]
    ) -> OwnColumns:
        """texts: of each its first row, and its tokens, one per row."""
        spans = [
            (span.token, first + span.begin, first + span.end)
            for first, text in texts
            for span in rule.spans(text)
        ]
        device = listed.device
        extra = torch.tensor(sorted({token for token, _, _ in spans}), device=device).long()
        ids = torch.cat([listed, extra]).sort().values
        table = torch.tensor(spans, device=device).long().reshape(-1, 3).T.contiguous()
        table[0] = torch.searchsorted(extra, table[0].contiguous())
        return cls(ids, extra, torch.searchsorted(ids, extra), table)

    def is_open(self, rows: Tensor) -> Tensor:
        """bool [R, E]: whether each own token is one where the newest token is in row r."""
        which, begin, end = self._spans
        inside = (rows[:, None] >= begin) & (rows[:, None] < end)
        result = torch.zeros(len(rows), len(self.extra), dtype=torch.int32, device=rows.device)
        return result.index_add_(1, which, inside.int()) > 0

    def close(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The same logits [R, N], of own tokens only those that are open."""
        kept = torch.where(self.is_open(rows), logits[:, self._places], -math.inf)
        return logits.index_copy(1, self._places, kept)

    def joined(self, logits: Tensor, own: Tensor, rows: Tensor) -> Tensor:
        """[R, N] from logits of the list and of the own tokens [R, E]."""
        result = logits.new_empty(len(logits), len(self.ids))
        is_listed = torch.ones(len(self.ids), dtype=torch.bool, device=logits.device)
        is_listed[self._places] = False
        result[:, is_listed] = logits
        result[:, self._places] = own.to(logits.dtype).masked_fill(~self.is_open(rows), -math.inf)
        return result
