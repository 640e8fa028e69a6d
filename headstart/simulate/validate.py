"""The simulator on a head that is being trained: the same numbers, from given states."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.simulate.answers import Batch
from headstart.simulate.matches import DraftLogits, Matches, answer_matches, unrolled
from headstart.simulate.rates import Rates, rates


@torch.no_grad()
def validate(
    head: MTPHead,
    lm_head: Tensor,
    embed: Tensor,
    rotary: RotaryTable,
    batches: Iterable[Batch],
    *,
    max_drafts: int = 8,
    draft_ids: Tensor | None = None,
) -> Rates:
    """Acceptance of a head with any dtype of parameters; `lm_head` [V, D] is the trunk's.

    Every answer's own sampling and seed are used: arg-max, or the engine's noise again.
    `draft_ids` [Vd], ascending, is a draft vocabulary.
    """
    logits = DraftLogits.of_weight(lm_head, draft_ids)
    found: list[Matches] = []
    for batch in batches:
        depths = unrolled(head, embed, rotary, batch, max_drafts)
        found += answer_matches(depths, batch, batch.answers, logits)
    return rates(found, max_drafts)
