"""A request's grammar, guarded: one that fails may end its own request only.

A grammar is foreign code, so what it raises and returns is checked. Of those that answer together
a call that fails while it moves them on ends the requests of that call.

Drafting and verification ask for the same masks, and the row after the last accepted draft is the
first one of the next round: each mask is computed once, by a copy that runs ahead with the drafts.
Device rounds take them as words of 32 tokens, other choices as flags: `TokenMask` has both. Those
of grammars that answer for many at once are in `mask_batch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch

from headstart.errors import RequestError
from headstart.sampling.masks import TokenMask, num_words

_QUICK = 1e-4  # seconds of a mask, below which a copy that goes on behind it would cost more


class Grammar(Protocol):
    """What a request may be held to."""

    def allowed(self) -> torch.Tensor | None:
        """The tokens that may come next, bool [V]; None for all."""
        ...

    def accept(self, token: int) -> bool:
        """Move on by a token; whether it fitted."""
        ...

    def fork(self) -> Grammar:
        """A copy that goes on by itself."""
        ...


@runtime_checkable
class WordGrammar(Protocol):
    """A grammar that has its masks as words already."""

    def allowed_words(self) -> np.ndarray | None:
        """Bits of the tokens that may come next, int32 [ceil(V / 32)]; None for all."""
        ...


@runtime_checkable
class ChainGrammar(Protocol):
    """A grammar that looks ahead without a copy; several may do so at once, in any threads."""

    def chain_words(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """`allowed_words` behind 0, 1, ... drafts, up to the first one that does not fit."""
        ...


@runtime_checkable
class BatchGrammar(Protocol):
    """A grammar that answers for many of its kind at once, and can take tokens for now."""

    def num_words(self) -> int:
        """Of its masks: no token behind them fits."""
        ...

    @staticmethod
    def fill(grammars: Sequence[Grammar], out: np.ndarray, ahead: int) -> None:
        """Write what each allows behind so many tokens taken for now: int32 [n, words].

        There are as many words as the grammars have, or more.
        """
        ...

    @staticmethod
    def look_ahead(grammars: Sequence[Grammar], tokens: Sequence[int]) -> Sequence[bool]:
        """Take a token for now, which its mask allows; whether each did.

        Accepting the same tokens keeps them; whatever else a grammar is asked comes without them.
        """
        ...

    @staticmethod
    def accept_each(grammars: Sequence[Grammar], tokens: Sequence[Sequence[int]]) -> None:
        """`accept` of each one's tokens, in order."""
        ...


class GuardedGrammar:
    """The masks of a grammar; where it fails, nothing is allowed and `error` has the reason."""

    def __init__(self, grammar: Grammar | None, num_tokens: int, error: str | None = None):
        self._grammar, self._num_tokens, self.error = grammar, num_tokens, error
        self._ahead: GuardedGrammar | None = None  # a copy that has accepted `_drafts` as well
        self._drafts: list[int] = []
        self._masks: list[TokenMask | None] = []  # after 0, 1, ... of `_drafts`
        self._is_quick = True  # whether the first of them may as well be computed once more
        kinds = (False, False, False) if grammar is None else _kinds_of(type(grammar))
        self._has_words, self.is_threaded, self._is_of_many = kinds

    @property
    def of_many(self) -> Grammar | None:
        """What is held, where it may answer together with others of its kind."""
        return self._grammar if self._is_of_many and self.error is None else None

    @property
    def num_words(self) -> int:
        """Of masks in words: no token behind them fits."""
        most = num_words(self._num_tokens)
        if self.of_many is None:
            return most
        try:
            return min(max(1, int(cast(BatchGrammar, self._grammar).num_words())), most)
        except Exception as error:
            self.fail("num_words", error)
            return most

    def masks(self, drafts: Sequence[int]) -> list[torch.Tensor | None]:
        """What is allowed after 0, 1, ... drafts, up to the first draft that does not fit.

        As bool [V] each; None where all tokens are.
        """
        return [None if mask is None else mask.flags for mask in self._chain(drafts)]

    def words(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """The same as int32 [ceil(V / 32)] each."""
        return [None if mask is None else mask.words for mask in self._chain(drafts)]

    def num_fitting(self, drafts: Sequence[int]) -> int:
        """How many of the drafts fit, up to the first that does not."""
        return len(self._chain(drafts)) - 1

    def _chain(self, drafts: Sequence[int]) -> list[TokenMask | None]:
        if self._drafts != list(drafts[: len(self._drafts)]):
            self._forget_drafts()
        if self._masks and not self._goes_on(drafts[len(self._drafts) :]):
            return list(self._masks)
        if drafts and self._is_quick and not self._drafts and self._looks_ahead(drafts):
            return list(self._masks)
        if not self._masks:
            started = time.thread_time()
            self._masks = [self._allowed()]
            self._is_quick = time.thread_time() - started < _QUICK
        for token in drafts[len(self._drafts) :]:
            ahead = self._ahead or self._run_ahead()
            self._ahead = None  # a token that does not fit may leave it anywhere
            if not ahead.accept(token):
                break
            self._ahead = ahead
            self._drafts.append(token)
            self._masks.append(ahead._allowed())
        return list(self._masks)

    def _goes_on(self, drafts: Sequence[int]) -> bool:
        """Whether the first of these, behind those that fit, fits as well."""
        mask = self._masks[-1]
        return bool(drafts) and (mask is None or mask.allows(drafts[0]))

    def _looks_ahead(self, drafts: Sequence[int]) -> bool:
        """Masks of a whole chain at once; where that fails, a copy shows behind which draft."""
        if not self.is_threaded or self.error is not None:
            return False
        try:
            found = list(cast(ChainGrammar, self._grammar).chain_words(drafts))
            is_chain = all(words is None or self._are_words(words) for words in found)
        except Exception:
            return False
        if not is_chain or not 1 <= len(found) <= len(drafts) + 1:
            return False
        self._masks = [None if words is None else self._mask(words) for words in found]
        self._ahead, self._drafts = None, list(drafts[: len(found) - 1])
        return True

    def _are_words(self, words: np.ndarray) -> bool:
        return words.dtype == np.int32 and words.shape == (num_words(self._num_tokens),)

    def _run_ahead(self) -> GuardedGrammar:
        ahead = self.fork()
        for token in self._drafts:
            ahead.accept(token)
        return ahead

    def allowed(self) -> torch.Tensor | None:
        """What may come next, bool [V]; None for all tokens."""
        mask = self._allowed()
        return None if mask is None else mask.flags

    def _allowed(self) -> TokenMask | None:
        if self.error is None and self._grammar is not None:
            try:
                mask = self._asked(self._grammar)
            except Exception as error:
                self.fail("allowed", error)
            else:
                if self.error is None:
                    return mask
        return self._mask(np.zeros(num_words(self._num_tokens), np.int32))

    def _mask(self, words: np.ndarray) -> TokenMask:
        return TokenMask(self._num_tokens, words=words)

    def _asked(self, grammar: Grammar) -> TokenMask | None:
        """What the grammar says; `error` where that is no mask."""
        if self._has_words:
            words = cast(WordGrammar, grammar).allowed_words()
            if words is None or self._are_words(words):
                return None if words is None else self._mask(words)
            found = f"an array of {words.shape} {words.dtype}"
            self.error = f"the grammar's allowed_words() gave {found}; {self._expected}"
            return None
        mask = grammar.allowed()
        if mask is None or self._is_mask(mask):
            # A copy: the grammar may write its next mask to the same place. By numpy, because torch
            # would wake its threads, which then take the cores from those of the kernels.
            return None if mask is None else TokenMask(self._num_tokens, flags=_copied(mask))
        self.error = f"the grammar's allowed() gave {_shown(mask)}; {self._expected}"
        return None

    @property
    def _expected(self) -> str:
        return f"expected a bool tensor of {self._num_tokens} tokens."

    def accept(self, token: int) -> bool:
        if self._drafts and self._drafts[0] == token:
            del self._drafts[0], self._masks[0]
        else:
            self._forget_drafts()
        if self.error is not None or self._grammar is None:
            return False
        try:
            return bool(self._grammar.accept(token))
        except Exception as error:
            self.fail("accept", error)
            return False

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Move on by tokens, up to one at which it fails or none is left; how many it took."""
        for number, token in enumerate(tokens):
            if token < 0:
                return number
            self.accept(token)
            if self.error is not None:
                return number + 1
        return len(tokens)

    def moved(self) -> None:
        """It has accepted tokens together with others."""
        if self._masks:
            self._forget_drafts()

    def fork(self) -> GuardedGrammar:
        copy = None
        if self.error is None and self._grammar is not None:
            try:
                copy = self._grammar.fork()
            except Exception as error:
                self.fail("fork", error)
        return GuardedGrammar(copy, self._num_tokens, self.error)

    def _forget_drafts(self) -> None:
        self._ahead, self._drafts, self._masks, self._is_quick = None, [], [], True

    def _is_mask(self, mask: torch.Tensor | None) -> bool:
        return (
            isinstance(mask, torch.Tensor)
            and mask.dtype == torch.bool
            and mask.shape == (self._num_tokens,)
        )

    def fail(self, name: str, error: Exception) -> None:
        """Nothing is allowed any more, because of what a method raised."""
        if isinstance(error, RequestError):  # one line for the user
            self.error = str(error)
        else:
            self.error = f"the grammar's {name}() failed: {type(error).__name__}: {error}"


@lru_cache(maxsize=64)  # a copy is made in every round, and asking a protocol takes long
def _kinds_of(kind: type) -> tuple[bool, bool, bool]:
    """Whether it has words, looks ahead by itself, in any thread, and answers for many."""
    protocols = WordGrammar, ChainGrammar, BatchGrammar
    has_words, is_threaded, is_of_many = (issubclass(kind, each) for each in protocols)
    return has_words, is_threaded, is_of_many


def _copied(mask: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(mask.cpu().numpy().copy())


def _shown(mask: torch.Tensor | None) -> str:
    if isinstance(mask, torch.Tensor):
        return f"a tensor of {tuple(mask.shape)} {mask.dtype}"
    return f"a {type(mask).__name__}"
