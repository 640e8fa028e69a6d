"""The LM heads that drafts go through: the trunk's, a module's own, or some rows of either."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headstart.backends.weights import Int8Linear
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead

LmHead = Linear | Int8Linear


@dataclass(frozen=True)
class DraftVocabRows:
    """Reduced LM heads for drafting, by module: row i is token ids[i]."""

    ids: Tensor
    lm_heads: tuple[LmHead, ...]


def own_lm_head(head: MTPHead, module: int) -> LmHead | None:
    """The one that a module does not share with the trunk, if it has one."""
    own = head.modules_[module].lm_head
    return own if isinstance(own, Linear | Int8Linear) else None
