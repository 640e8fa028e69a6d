"""Where an answer is in its compiled grammar: masks of what may come next, for one or for many.

What a grammar may cost while it is used is bounded: an ambiguous one can take seconds for a single
token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from headstart.errors import RequestError
from headstart.sampling.masks import num_words, unpacked

# Processor time that a grammar may take: a store that fills with every token.
_STORE_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.005
_CHAIN_SECONDS = _STORE_SECONDS  # by the clock, after which a chain is followed no further


@dataclass(frozen=True)
class KnownTokens:
    """Those of a model: `size` of them are known to xgrammar, the others never fit."""

    vocab_size: int
    size: int
    special: frozenset[int]

    def room(self, rows: int) -> np.ndarray:
        """Masks in which nothing is allowed, int32 [rows, words]."""
        return np.zeros((rows, num_words(self.vocab_size)), np.int32)

    def widened(self, known: np.ndarray) -> np.ndarray:
        """Masks of all tokens, from those of the known ones."""
        if self.size == self.vocab_size:
            return known
        masks = self.room(len(known))
        masks[:, : known.shape[1]] = known
        return masks

    def end_of(self, words: np.ndarray) -> None:
        """Clear what lies behind the last known token in its word."""
        spare = -self.size % 32
        if spare and self.size < self.vocab_size:
            words[..., self.size >> 5] &= (1 << (32 - spare)) - 1


class TokenGrammar:
    """Where one answer is in its grammar; the engine's grammar protocol."""

    def __init__(self, matcher: Any, tokens: KnownTokens, allowance: Allowance):
        self._matcher, self._tokens, self._allowance = matcher, tokens, allowance

    def allowed_words(self) -> np.ndarray | None:
        """Bits of the tokens that may come next; the end token's where the text may end."""
        words, started = self._tokens.room(1), time.thread_time()
        is_mask = self._fill(words)
        self._allowance.spend(time.thread_time() - started)
        return words[0] if is_mask else None

    @staticmethod
    def first_words(grammars: Sequence[TokenGrammar]) -> list[np.ndarray | None]:
        """`allowed_words` of many, of one tokenizer, in one call: no request is charged for it."""
        tokens = grammars[0]._tokens
        assert all(grammar._tokens is tokens for grammar in grammars)
        known = np.zeros((len(grammars), num_words(tokens.size)), np.int32)
        matchers = [grammar._matcher for grammar in grammars]
        going = [row for row, matcher in enumerate(matchers) if not matcher.is_terminated()]
        if going:
            _batch().batch_fill_next_token_bitmask([matchers[row] for row in going], known, going)
        masks = tokens.widened(known)
        tokens.end_of(masks)
        return list(masks)

    def chain_words(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """The same behind 0, 1, ... drafts, up to the first one that does not fit."""
        tokens, started = self._tokens, time.thread_time()
        drafts = list(takewhile(lambda token: token < tokens.size, drafts))
        rows = len(drafts) + 1
        known = np.zeros((rows, num_words(tokens.size)), np.int32)  # xgrammar ignores strides
        is_whole = self._matcher.traverse_draft_tree(
            np.array([*range(1, rows), -1]), np.full(rows, -1), np.array([0, *drafts]), known,
            _CHAIN_SECONDS,
        )  # fmt: skip
        fitting = 0
        while is_whole and fitting < len(drafts) and _has(known[fitting], drafts[fitting]):
            fitting += 1
        self._allowance.spend(time.thread_time() - started - _SECONDS_PER_TOKEN * fitting)
        if not is_whole:  # others held up the thread: what would follow the drafts is not known
            return [self.allowed_words()]
        masks = tokens.widened(known[: fitting + 1])
        tokens.end_of(masks)
        return list(masks)

    def _fill(self, words: np.ndarray) -> bool:
        """Whether a mask [1, words] that allows nothing became one, or all tokens may come."""
        if self._matcher.is_terminated():
            return True
        tokens = self._tokens
        known = words[:, : num_words(tokens.size)]
        if not self._matcher.fill_next_token_bitmask(known):
            if tokens.size == tokens.vocab_size:
                return False
            known[:] = -1
        tokens.end_of(words)
        return True

    def allowed(self) -> torch.Tensor | None:
        """The same, bool [vocab_size]."""
        words = self.allowed_words()
        return None if words is None else unpacked(words, self._tokens.vocab_size)

    def accept(self, token: int) -> bool:
        started = time.thread_time()
        fits = self._accept(token)
        self._allowance.spend(time.thread_time() - started - _SECONDS_PER_TOKEN)
        return fits

    def _accept(self, token: int) -> bool:
        # Asked about tokens behind the end, or special ones that do not fit, xgrammar would warn on
        # standard error; drafts hold both.
        if token >= self._tokens.size or self._matcher.is_terminated():
            return False
        if token in self._tokens.special and not self._allows(token):
            return False
        return bool(self._matcher.accept_token(token))

    def fork(self) -> TokenGrammar:
        return TokenGrammar(self._matcher.fork(), self._tokens, self._allowance)

    def _allows(self, token: int) -> bool:
        words = self.allowed_words()
        return words is None or _has(words, token)


@cache
def _batch() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=1)


def _has(words: np.ndarray, token: int) -> bool:
    """Whether a mask allows a token; one that it has no bit for is not allowed."""
    at = token >> 5
    return 0 <= at < len(words) and bool((int(words[at]) >> (token & 31)) & 1)


class Allowance:
    """Processor seconds that a request's grammar may still take; shared by its forks."""

    def __init__(self) -> None:
        self._left = _STORE_SECONDS

    def spend(self, seconds: float) -> None:
        if self._left >= 0:  # a store that was empty once stays empty: every fork must fail alike
            self._left = min(_STORE_SECONDS, self._left - seconds)
        if self._left < 0:
            raise RequestError(
                "the grammar takes too long to follow: it is ambiguous, or repeats what repeats. "
                "Write it so that a text fits in one way only."
            )
