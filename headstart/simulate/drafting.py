"""What drafts are chosen from where plain modules score: a list, texts' own tokens, or all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from headstart.errors import HeadNotFound
from headstart.models.build import LoadedModel
from headstart.simulate.answers import Answer, Batch
from headstart.simulate.matches import DraftLogits
from headstart.simulate.own_columns import OwnColumns
from headstart.vocab.own_tokens import OwnRule

if TYPE_CHECKING:
    from headstart.vocab.draft_vocab import DraftVocab


@dataclass(frozen=True)
class Drafting:
    """What drafts of one vocabulary are chosen from; `rule`: and of texts' own tokens."""

    built: LoadedModel
    shared: DraftLogits
    rule: OwnRule | None

    @classmethod
    def of(cls, built: LoadedModel, vocab: DraftVocab | None, own: int) -> Drafting:
        ids = None if vocab is None else torch.tensor(vocab.ids, device=built.device)
        rule = None
        if own and vocab is not None:
            rule = OwnRule.of(vocab.ids, built.config.vocab, own)
        return cls(built, _logits(built, ids), rule)

    def logits(self, batch: Batch, answers: Sequence[Answer]) -> DraftLogits:
        """For these answers of a batch."""
        if self.rule is None or self.shared.ids is None:
            return self.shared
        starts = batch.documents.starts
        texts = [
            (first, batch.ids[first : first + batch.documents.lengths[at]].tolist())
            for at, first in ((at, starts[at]) for at in {a.document for a in answers})
        ]
        columns = OwnColumns.of(self.rule, self.shared.ids, texts)
        return replace(_logits(self.built, columns.ids), own=columns)


def _logits(built: LoadedModel, ids: torch.Tensor | None) -> DraftLogits:
    """As the engine's runner computes them, so that not even rounding differs."""

    def of(lm_head: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        kept = lm_head if ids is None else lm_head.only_rows(ids)

        def compute(states: torch.Tensor) -> torch.Tensor:
            values = kept(states)
            assert isinstance(values, torch.Tensor)
            return values if values.dtype == torch.float64 else values.float()

        return compute

    own = tuple(of(lm_head) for lm_head in head_of(built).own_lm_heads)
    return DraftLogits(of(built.trunk.lm_head), ids, own)


def head_of(built: LoadedModel) -> Any:
    if built.head is None:
        raise HeadNotFound(
            f"{built.checkpoint.folder} has no head to score. Give one with --head, or make one "
            "with `headstart graft`."
        )
    return built.head
