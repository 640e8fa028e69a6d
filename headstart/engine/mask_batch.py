"""Grammars of a round that answer together: one call for the masks behind a draft, not one for each.

Calls into a grammar's library cost more than most masks do. A matcher takes the drafts that fit for
now, and what the round then accepts of them need not be taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from headstart.backends.rounds import RoundMasks
from headstart.engine.grammar import BatchGrammar, Grammar, GuardedGrammar

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
            row[:] = -1 if words is None else words
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

    def __init__(self, grammars: Mapping[int, GuardedGrammar], rows: MaskRows):
        """Find what may come next of each, by index; what fails is left for others to ask."""
        self._rows = rows
        self._kinds: dict[type[BatchGrammar], dict[int, GuardedGrammar]] = {}
        for index, grammar in grammars.items():
            if (inner := grammar.of_many) is not None:
                kind = cast(type[BatchGrammar], type(inner))
                self._kinds.setdefault(kind, {})[index] = grammar
        for kind, own in list(self._kinds.items()):
            if not self._fill(kind, own, list(own), 0):
                del self._kinds[kind]

    def follow(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Find what comes behind drafts, of each up to the first that does not fit."""
        for kind, own in self._kinds.items():
            going, depth = [index for index in own if index in drafts], 0
            while going := [index for index in going if len(drafts[index]) > depth]:
                going = self._rows.allowing(going, [drafts[index][depth] for index in going])
                tokens = [drafts[index][depth] for index in going]
                depth += 1
                going = self._taking(kind, own, going, tokens)
                if not self._fill(kind, own, going, depth):
                    break  # no draft counts behind the last mask

    def _taking(
        self, kind: type[BatchGrammar], own: Mapping[int, GuardedGrammar], going: list[int],
        tokens: list[int],
    ) -> list[int]:  # fmt: skip
        """Those that have taken their token."""
        if not going:
            return []
        try:
            taken = kind.look_ahead(_inner(own, going), tokens)
            return [index for index, is_in in zip(going, taken, strict=True) if is_in]
        except Exception as error:  # where each of them is now nothing tells
            for index in going:
                own[index].fail("look_ahead", error)
            return []

    def _fill(
        self, kind: type[BatchGrammar], own: Mapping[int, GuardedGrammar], going: list[int],
        depth: int,
    ) -> bool:  # fmt: skip
        """Whether there are masks of all these now."""
        if not going:
            return False
        try:
            kind.fill(_inner(own, going), self._rows.free(len(going)))
        except Exception:
            return False
        self._rows.keep(going, depth)
        return True


def accept_together(asked: Sequence[tuple[GuardedGrammar, Sequence[int]]]) -> list[int]:
    """`GuardedGrammar.accept_all` of each, with one call for all of a kind."""
    found = [0] * len(asked)
    kinds: dict[type[BatchGrammar], list[int]] = {}
    for at, (grammar, tokens) in enumerate(asked):
        if (inner := grammar.of_many) is None:
            found[at] = grammar.accept_all(tokens)
        else:
            kinds.setdefault(cast(type[BatchGrammar], type(inner)), []).append(at)
    for kind, places in kinds.items():
        own = {at: asked[at][0] for at in places}
        chosen = [_chosen(asked[at][1]) for at in places]
        try:
            kind.accept_each(_inner(own, places), chosen)
        except Exception as error:
            for grammar in own.values():
                grammar.fail("accept_each", error)
            chosen = [tokens[:1] for tokens in chosen]  # answers end with the first of them
        for at, tokens in zip(places, chosen, strict=True):
            own[at].moved()
            found[at] = len(tokens)
    return found


def _inner(own: Mapping[int, GuardedGrammar], indices: Sequence[int]) -> list[Grammar]:
    return [cast(Grammar, own[index].of_many) for index in indices]


def _chosen(tokens: Sequence[int]) -> Sequence[int]:
    """Tokens up to where none was left to choose."""
    return tokens[: next((at for at, token in enumerate(tokens) if token < 0), len(tokens))]
