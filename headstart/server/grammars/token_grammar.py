"""Where an answer is in its compiled grammar: masks of what may come next, for one or for many.

What a grammar may cost while it is used is bounded: an ambiguous one can take seconds for a single
token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from headstart.errors import RequestError
from headstart.sampling.masks import has_token, num_words, unpacked

# Processor time that a grammar may take: a store that fills with every token.
_STORE_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.005
_CHAIN_SECONDS = _STORE_SECONDS  # by the clock, after which a chain is followed no further
# What calls raise where xgrammar has other handles or parameters: before anything has moved.
_UNKNOWN = (AttributeError, TypeError)

_log = logging.getLogger("headstart.server")


@dataclass(frozen=True)
class KnownTokens:
    """Those of a model: `size` of them are known to xgrammar, the others never fit."""

    vocab_size: int
    size: int
    special: frozenset[int]
    ends: frozenset[int]  # behind which nothing comes

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
        self._ahead: list[int] = []  # tokens behind those of the answer, taken for now
        self._is_ended = False  # with an end token

    def allowed_words(self) -> np.ndarray | None:
        """Bits of the tokens that may come next; the end token's where the text may end."""
        self._go_back()
        words, started = self._tokens.room(1), time.thread_time()
        is_mask = self._fill(words)
        self._allowance.spend(time.thread_time() - started)
        return words[0] if is_mask else None

    # Of many grammars of one tokenizer: no request is charged for it.

    def num_words(self) -> int:
        """Of masks: no token behind them fits."""
        return num_words(self._tokens.size)

    @staticmethod
    def fill(grammars: Sequence[TokenGrammar], out: np.ndarray, ahead: int) -> None:
        """Write masks [n, words] behind so many tokens that each has taken for now."""
        tokens, words = grammars[0]._tokens, grammars[0].num_words()
        if any(grammar._tokens is not tokens for grammar in grammars):
            raise ValueError("grammars of two compilers do not answer together")
        for grammar in grammars:
            if len(grammar._ahead) > ahead:  # it was left there, in a round that came to nothing
                grammar._go_back()
        is_whole = out.shape[1] == words
        known = out if is_whole else np.empty((len(grammars), words), np.int32)
        ended = [row for row, grammar in enumerate(grammars) if grammar._is_ended]
        going = grammars
        rows = None  # all
        if ended:
            known[ended] = 0
            rows = [row for row, grammar in enumerate(grammars) if not grammar._is_ended]
            going = [grammars[row] for row in rows]
        if going:
            _batch().batch_fill_next_token_bitmask(_handles(going), known, rows, False)
        if not is_whole:
            out[:, :words], out[:, words:] = known, 0
        tokens.end_of(out)

    @staticmethod
    def look_ahead(grammars: Sequence[TokenGrammar], tokens: Sequence[int]) -> Sequence[bool]:
        """Take a token of each for now, which its mask allows; whether each did."""
        ends, taken = grammars[0]._tokens.ends, _accept(grammars, tokens)
        for grammar, token, is_in in zip(grammars, tokens, taken, strict=True):
            if is_in:
                grammar._ahead.append(token)
                grammar._is_ended = token in ends
        return taken

    @staticmethod
    def accept_each(grammars: Sequence[TokenGrammar], tokens: Sequence[Sequence[int]]) -> None:
        """`accept` of each one's tokens, most of which are taken already."""
        known, last, following = grammars[0]._tokens, list[TokenGrammar](), list[int]()
        back, others = list[TokenGrammar](), list[tuple[TokenGrammar, Sequence[int]]]()
        for grammar, own in zip(grammars, tokens, strict=True):
            ahead, at = grammar._ahead, 0
            while at < len(ahead) and at < len(own) and ahead[at] == own[at]:
                at += 1
            del ahead[:at]
            is_one = len(own) == at + 1 and (ahead or not grammar._is_ended)
            if is_one and own[at] < known.size and own[at] not in known.special:
                last.append(grammar)
                following.append(own[at])
                if ahead:
                    back.append(grammar)
            else:
                others.append((grammar, own[at:]))
            grammar._allowance.refill(len(own))
        if back:
            _rollback(back)
        if last:
            _accept(last, following)
        for grammar, rest in others:
            if rest:
                grammar._go_back()
            for token in rest:
                grammar._accept(token)

    def chain_words(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """`allowed_words` behind 0, 1, ... drafts, up to the first one that does not fit."""
        self._go_back()
        tokens, started = self._tokens, time.thread_time()
        drafts = list(takewhile(lambda token: token < tokens.size, drafts))
        rows = len(drafts) + 1
        known = np.zeros((rows, num_words(tokens.size)), np.int32)  # xgrammar ignores strides
        is_whole = self._matcher.traverse_draft_tree(
            np.array([*range(1, rows), -1]), np.full(rows, -1), np.array([0, *drafts]), known,
            _CHAIN_SECONDS,
        )  # fmt: skip
        fitting = 0
        while is_whole and fitting < len(drafts) and has_token(known[fitting], drafts[fitting]):
            fitting += 1
        self._allowance.spend(time.thread_time() - started - _SECONDS_PER_TOKEN * fitting)
        if not is_whole:  # others held up the thread: what would follow the drafts is not known
            return [self.allowed_words()]
        masks = tokens.widened(known[: fitting + 1])
        tokens.end_of(masks)
        return list(masks)

    def _fill(self, words: np.ndarray) -> bool:
        """Whether a mask [1, words] that allows nothing became one, or all tokens may come."""
        if self._is_ended:
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
        """`allowed_words` as bool [vocab_size]."""
        words = self.allowed_words()
        return None if words is None else unpacked(words, self._tokens.vocab_size)

    def accept(self, token: int) -> bool:
        if self._ahead and self._ahead[0] == token:
            del self._ahead[0]
            self._allowance.refill(1)
            return True
        self._go_back()
        started = time.thread_time()
        fits = self._accept(token)
        self._allowance.spend(time.thread_time() - started - _SECONDS_PER_TOKEN)
        return fits

    def _accept(self, token: int) -> bool:
        # Asked about tokens behind the end, or special ones that do not fit, xgrammar would warn on
        # standard error; drafts hold both.
        if token >= self._tokens.size or self._is_ended:
            return False
        if token in self._tokens.special and not self._allows(token):
            return False
        fits = bool(self._matcher.accept_token(token))
        self._is_ended = fits and token in self._tokens.ends
        return fits

    def _go_back(self) -> None:
        """To the end of the answer."""
        if self._ahead:
            self._matcher.rollback(len(self._ahead))
            self._ahead, self._is_ended = [], False

    def fork(self) -> TokenGrammar:
        self._go_back()
        copy = TokenGrammar(self._matcher.fork(), self._tokens, self._allowance)
        copy._is_ended = self._is_ended
        return copy

    def _allows(self, token: int) -> bool:
        words = self._tokens.room(1)
        return not self._fill(words) or has_token(words[0], token)


# The library lets go of Python's lock in every call. Another thread takes it then, and has it back
# when it is done: one call for many is worth more than the time of its own that it saves. The
# library's Python classes only wrap these handles and convert results one by one; calling directly
# saves that. They are not its public interface: where they are gone, each matcher is asked.


@cache
def _batch() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=1)._handle


def _accept(grammars: Sequence[TokenGrammar], tokens: Sequence[int]) -> Sequence[bool]:
    """Let each take its token; whether it did."""
    try:
        taken = _batch().batch_accept_token(_handles(grammars), tokens, False)
    except _UNKNOWN:
        _warn()
        pairs = zip(grammars, tokens, strict=True)
        return [bool(grammar._matcher.accept_token(token)) for grammar, token in pairs]
    return [True] * len(tokens) if 0 not in taken else [bool(each) for each in taken]


def _rollback(grammars: Sequence[TokenGrammar]) -> None:
    """Each to the end of its answer."""
    try:
        _batch().batch_rollback(_handles(grammars), [len(grammar._ahead) for grammar in grammars])
    except _UNKNOWN:
        _warn()
        for grammar in grammars:
            grammar._matcher.rollback(len(grammar._ahead))
    for grammar in grammars:
        grammar._ahead, grammar._is_ended = [], False


def _handles(grammars: Sequence[TokenGrammar]) -> list[Any]:
    return [grammar._matcher._handle for grammar in grammars]


@cache  # every round would say it again
def _warn() -> None:
    """Log what was just caught."""
    _log.warning("matchers of this xgrammar move on one by one; this is logged once", exc_info=True)


class Allowance:
    """Processor seconds that a request's grammar may still take; shared by its forks."""

    def __init__(self) -> None:
        self._left = _STORE_SECONDS

    def refill(self, tokens: int) -> None:
        """For tokens that were accepted at no charge."""
        if self._left >= 0:
            self._left = min(_STORE_SECONDS, self._left + tokens * _SECONDS_PER_TOKEN)

    def spend(self, seconds: float) -> None:
        if self._left >= 0:  # a store that was empty once stays empty: every fork must fail alike
            self._left = min(_STORE_SECONDS, self._left - seconds)
        if self._left < 0:
            raise RequestError(
                "the grammar takes too long to follow: it is ambiguous, or repeats what repeats. "
                "Write it so that a text fits in one way only."
            )
