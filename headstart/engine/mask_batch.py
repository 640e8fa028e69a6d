"""Grammars of a round that answer together: one call for all masks behind a draft.

Calls into a grammar's library cost more than most masks do. A matcher takes the drafts that fit for
now, and what the round then accepts of them need not be taken again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from headstart.backends.base import RoundMasks
from headstart.engine.grammar import BatchGrammar, Grammar, GuardedGrammar

# Seconds of a processor, beyond which no further draft of a round is followed: all requests of the
# round wait meanwhile.
_MOST_SECONDS = 0.05

_log = logging.getLogger("headstart.engine")

Masks = list[np.ndarray | None]  # behind 0, 1, ... drafts, as `GuardedGrammar.words` gives them


class MaskRows:
    """The masks of a round, in the order in which they are found, where the device takes them."""

    def __init__(self, room: np.ndarray):
        self._room = room
        self._requests: list[int] = []
        self._depths: list[int] = []
        self.ends: dict[int, int] = {}  # the last row of each request so far, by index

    def free(self, count: int) -> np.ndarray:
        """Rows for so many masks; `keep` takes them when they are written."""
        start = len(self._requests)
        return self._room[start : start + count]

    def keep(self, indices: Sequence[int], depth: int) -> None:
        """The next free rows belong to these requests, behind so many drafts."""
        start = len(self._requests)
        self.ends.update(zip(indices, range(start, start + len(indices)), strict=True))
        self._requests += indices
        self._depths += [depth] * len(indices)

    def add(self, index: int, masks: Masks) -> None:
        """All masks of one request."""
        for depth, (row, words) in enumerate(zip(self.free(len(masks)), masks, strict=True)):
            row[:] = -1 if words is None else words[: len(row)]
            self.keep([index], depth)

    def allowing(self, indices: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Of these requests those whose last mask allows their token."""
        ids = np.array(tokens)
        is_known = (ids >= 0) & (ids < 32 * self._room.shape[1])
        ids = np.where(is_known, ids, 0)
        words = self._room[[self.ends[index] for index in indices], ids >> 5]
        fits = is_known & ((words >> (ids & 31)) & 1).astype(bool)
        return [index for index, fit in zip(indices, fits.tolist(), strict=True) if fit]

    def of(self, indices: Iterable[int]) -> RoundMasks:
        """All that was kept, for these requests."""
        words = self._room[: len(self._requests)]
        ends = {index: self.ends[index] for index in indices}
        return RoundMasks(words, self._requests, self._depths, ends)


class MaskBatch:
    """Those grammars of one round that answer with others of their kind."""

    def __init__(
        self,
        grammars: Mapping[int, GuardedGrammar],
        rows: MaskRows,
        failed: set[type[BatchGrammar]],
    ):
        """Find what may come next of each, by index; what fails is left for others to ask.

        failed: kinds whose failure is in the log already; further ones are added.
        """
        self._grammars, self._rows, self._failed = grammars, rows, failed
        self._took: dict[type[BatchGrammar], float] = {}  # seconds, for what comes next
        able = {index: each.of_many for index, each in grammars.items()}
        for kind, own in _by_kind(able).items():
            started = time.thread_time()
            self._fill(kind, own, 0)
            self._took[kind] = time.thread_time() - started

    def follow(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Find what comes behind drafts, of each up to the first that does not fit.

        A draft is followed where that ends in time if it takes as long as the one before did. Where
        masks end before the drafts do, drafts do not count behind the last one.
        """
        until = time.thread_time() + _MOST_SECONDS
        begun = {i: self._grammars[i].of_many for i in drafts if i in self._rows.ends}
        for kind, going in _by_kind(begun).items():
            depth, took = 0, self._took[kind]
            while tokens := {i: drafts[i][depth] for i in going if len(drafts[i]) > depth}:
                started = time.thread_time()
                if started + took > until:
                    break
                fitting = self._rows.allowing(list(tokens), list(tokens.values()))
                depth += 1
                going = self._taking(kind, {i: going[i] for i in fitting}, tokens)
                if not self._fill(kind, going, depth):
                    break
                took = time.thread_time() - started

    def _taking(
        self, kind: type[BatchGrammar], going: dict[int, Grammar], tokens: Mapping[int, int]
    ) -> dict[int, Grammar]:
        """Those that have taken their token."""
        if not going:
            return {}
        try:
            taken = kind.look_ahead(list(going.values()), [tokens[index] for index in going])
            pairs = list(zip(going, taken, strict=True))
        except Exception as error:  # where each of them is now nothing tells
            for index in going:
                self._grammars[index].fail("look_ahead", error)
            return {}
        return {index: going[index] for index, is_in in pairs if is_in}

    def _fill(self, kind: type[BatchGrammar], going: dict[int, Grammar], depth: int) -> bool:
        """Whether there are masks of these now, and any."""
        if not going:
            return False
        try:
            kind.fill(list(going.values()), self._rows.free(len(going)), depth)
        except Exception as error:
            if kind not in self._failed:
                self._failed.add(kind)
                _log.warning(
                    "masks of %d x %s at once, behind %d drafts, failed; this is logged once",
                    len(going), kind.__name__, depth, exc_info=error,
                )  # fmt: skip
            return False
        self._rows.keep(list(going), depth)
        return True


def accept_together(asked: Sequence[tuple[GuardedGrammar, Sequence[int]]]) -> list[int]:
    """`GuardedGrammar.accept_all` of each, with one call for all of a kind."""
    able = {at: grammar.of_many for at, (grammar, _) in enumerate(asked)}
    found = [0] * len(asked)
    for at, inner in able.items():
        if inner is None:
            found[at] = asked[at][0].accept_all(asked[at][1])
    for kind, own in _by_kind(able).items():
        chosen = [_chosen(asked[at][1]) for at in own]
        try:
            kind.accept_each(list(own.values()), chosen)
        except Exception as error:
            for at in own:
                asked[at][0].fail("accept_each", error)
            chosen = [tokens[:1] for tokens in chosen]  # answers end with the first of them
        for at, tokens in zip(own, chosen, strict=True):
            asked[at][0].moved()
            found[at] = len(tokens)
    return found


def _by_kind(able: Mapping[int, Grammar | None]) -> dict[type[BatchGrammar], dict[int, Grammar]]:
    found: dict[type[BatchGrammar], dict[int, Grammar]] = {}
    for index, inner in able.items():
        if inner is not None:
            found.setdefault(cast(type[BatchGrammar], type(inner)), {})[index] = inner
    return found


def _chosen(tokens: Sequence[int]) -> Sequence[int]:
    """Tokens up to where none was left to choose."""
    if not tokens or min(tokens) >= 0:
        return tokens
    return tokens[: next(at for at, token in enumerate(tokens) if token < 0)]
