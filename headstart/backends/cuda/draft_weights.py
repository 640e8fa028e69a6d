"""What captured rounds draft with: the head, LM heads by draft vocabulary, and int8 copies of both.

Copies halve what a draft reads, and the text stays the same: what is emitted is the trunk's own
choice, a draft can only be accepted or not. Captured rounds read all of this where it lies, so
another head or vocabulary is written into the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from headstart.backends.base import BackendOptions
from headstart.backends.cuda.int8 import add_int8, int8_bytes, with_int8
from headstart.backends.cuda.kernel_linear import KernelLinear
from headstart.backends.cuda.round_model import DraftTokens
from headstart.backends.draft_lm_heads import LmHead
from headstart.models.build import LoadedModel
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead


class DraftWeights:
    """Of one model, whose trunk decides with weights that are never rounded for drafts."""

    def __init__(self, model: LoadedModel, options: BackendOptions):
        self._trunk, self._head, self._config = model.trunk, model.head, model.config
        is_int8 = options.draft_weights == "int8"
        if options.draft_weights == "auto":
            is_int8 = not options.exact and model.dtype.itemsize == 2
        self._is_int8 = is_int8 and model.head is not None
        self._has_copy = False  # whether the head has its copy
        self._tokens: list[DraftTokens] = []  # that captured rounds read

    def copy_bytes(self, vocab_tokens: int) -> int:
        """What copies of head and LM heads take; `vocab_tokens`: of all draft vocabularies."""
        if self._head is None or not self._is_int8:
            return 0
        if isinstance(self._trunk.lm_head, KernelLinear):
            return int8_bytes(self._head)
        lm_head_rows = self._config.vocab + vocab_tokens
        return int8_bytes(self._head) + lm_head_rows * (self._config.hidden + 4)

    def copy_head(self) -> None:
        """Give the head its copy, where rounds draft with one."""
        if self._head is not None and self._is_int8:
            add_int8(self._head)
            self._has_copy = True

    def copy_new_head(self, head: MTPHead) -> None:
        """Give a head that will be written over the running one what that one has."""
        if self._has_copy:
            add_int8(head)

    def copy_new_rows(self, running: LmHead, new: LmHead) -> None:
        """The same for rows of an LM head."""
        if running.int8 is not None:
            add_int8(new)

    def tokens(self, lm_heads: Iterable[LmHead], ids: Tensor | None) -> DraftTokens:
        """What drafts are chosen among, by these LM heads of the modules; ids None: all tokens."""
        # Kernels run with no others.
        found = [own for own in _distinct(lm_heads) if isinstance(own, Linear)]
        if self._is_int8:
            found = [self._with_copy(own) for own in found]
        self._tokens.append(DraftTokens.of(found, ids, self._config.vocab))
        return self._tokens[-1]

    def _with_copy(self, lm_head: Linear) -> Linear:
        """An LM head with a copy for drafts; the trunk's own has to decide without one."""
        if lm_head is self._trunk.lm_head:
            return lm_head if isinstance(lm_head, KernelLinear) else with_int8(lm_head)
        add_int8(lm_head)
        return lm_head

    def ids_changed(self) -> None:
        """Other ids may have been written over those of draft vocabularies."""
        for tokens in self._tokens:
            tokens.ids_changed()

    def clear(self) -> None:
        """Forget what was chosen among: rounds are made anew."""
        self._tokens.clear()


def whole_rows(lm_heads: Iterable[LmHead]) -> tuple[Tensor, ...]:
    """Weights of the modules' whole LM heads, where kernels can read single rows of all of them."""
    kept = _distinct(lm_heads)
    if any(type(own) is not Linear for own in kept):
        return ()
    return tuple(own.weight for own in kept)


def _distinct(lm_heads: Iterable[LmHead]) -> list[LmHead]:
    """One, where modules share it."""
    return list({id(own): own for own in lm_heads}.values())
