"""Grammars of a round that answer together: one call for all masks behind a draft.

Calls into a grammar's library cost more than most masks do. A matcher takes the drafts that fit for
now, and what the round then accepts of them need not be taken again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
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

    def of(self, indices: Iterable[int]) -> RoundMasks:
        """All that was kept, for these requests."""
        words = self._room[: len(self._requests)]
        ends = {index: self.ends[index] for index in indices}
        return RoundMasks(words, self._requests, self._depths, ends)


@dataclass(frozen=True)
class _Going:
    """Grammars of one kind that still follow their drafts, with the indices of their requests."""

    kind: type[BatchGrammar]
    indices: list[int]
    grammars: list[Grammar]

    def only(self, keeps: Sequence[bool]) -> _Going:
        if all(keeps):
            return self
        indices = list(compress(self.indices, keeps))
        return _Going(self.kind, indices, list(compress(self.grammars, keeps)))


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
        # Whose masks were found, where these are, and the seconds that they took.
        self._begun: list[tuple[_Going, np.ndarray, float]] = []
        for going in _by_kind({index: each.of_many for index, each in grammars.items()}):
            started = time.thread_time()
            masks = self._fill(going, 0)
            if masks is not None:
                self._begun.append((going, masks, time.thread_time() - started))

    def follow(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Find what comes behind drafts, of each up to the first that does not fit.

        A draft is followed where that ends in time if it takes as long as the one before did. Where
        masks end before the drafts do, drafts do not count behind the last one.
        """
        until = time.thread_time() + _MOST_SECONDS
        for going, masks, took in self._begun:
            for depth in range(max((len(own) for own in drafts.values()), default=0)):
                started = time.thread_time()
                if started + took > until:
                    break
                tokens = np.array([_at(drafts.get(index, ()), depth) for index in going.indices])
                fits = _allowed(masks, tokens)
                going = self._taking(going.only(fits.tolist()), tokens[fits].tolist())
                found = self._fill(going, depth + 1)
                if found is None:
                    break
                masks, took = found, time.thread_time() - started

    def _taking(self, going: _Going, tokens: list[int]) -> _Going:
        """Those that have taken their token."""
        if not tokens:
            return going
        try:
            taken = list(going.kind.look_ahead(going.grammars, tokens))
            return going.only(taken)
        except Exception as error:  # where each of them is now nothing tells
            for index in going.indices:
                self._grammars[index].fail("look_ahead", error)
            return going.only([False] * len(tokens))

    def _fill(self, going: _Going, depth: int) -> np.ndarray | None:
        """Masks of these now, if there are any."""
        if not going.indices:
            return None
        masks = self._rows.free(len(going.indices))
        try:
            going.kind.fill(going.grammars, masks, depth)
        except Exception as error:
            if going.kind not in self._failed:
                self._failed.add(going.kind)
                _log.warning(
                    "masks of %d x %s at once, behind %d drafts, failed; this is logged once",
                    len(going.indices), going.kind.__name__, depth, exc_info=error,
                )  # fmt: skip
            return None
        self._rows.keep(going.indices, depth)
        return masks


def _at(drafts: Sequence[int], depth: int) -> int:
    """A draft; -1, which fits nowhere, where there is none."""
    return drafts[depth] if depth < len(drafts) else -1


def _allowed(masks: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether each mask [n, words] allows its token."""
    is_known = (tokens >= 0) & (tokens < 32 * masks.shape[1])
    ids = np.where(is_known, tokens, 0)
    bits = masks[np.arange(len(ids)), ids >> 5] >> (ids & 31)
    found: np.ndarray = is_known & (bits & 1).astype(bool)
    return found


def accept_together(asked: Sequence[tuple[GuardedGrammar, Sequence[int]]]) -> list[int]:
    """`GuardedGrammar.accept_all` of each, with one call for all of a kind."""
    able = {at: grammar.of_many for at, (grammar, _) in enumerate(asked)}
    found = [0] * len(asked)
    for at, inner in able.items():
        if inner is None:
            found[at] = asked[at][0].accept_all(asked[at][1])
    for going in _by_kind(able):
        chosen = [_chosen(asked[at][1]) for at in going.indices]
        try:
            going.kind.accept_each(going.grammars, chosen)
        except Exception as error:
            for at in going.indices:
                asked[at][0].fail("accept_each", error)
            chosen = [tokens[:1] for tokens in chosen]  # answers end with the first of them
        for at, tokens in zip(going.indices, chosen, strict=True):
            asked[at][0].moved()
            found[at] = len(tokens)
    return found


def _by_kind(able: Mapping[int, Grammar | None]) -> list[_Going]:
    found: dict[type[BatchGrammar], _Going] = {}
    for index, inner in able.items():
        if inner is not None:
            kind = cast(type[BatchGrammar], type(inner))
            going = found.setdefault(kind, _Going(kind, [], []))
            going.indices.append(index)
            going.grammars.append(inner)
    return list(found.values())


def _chosen(tokens: Sequence[int]) -> Sequence[int]:
    """Tokens up to where none was left to choose."""
    if not tokens or min(tokens) >= 0:
        return tokens
    return tokens[: next(at for at, token in enumerate(tokens) if token < 0)]
