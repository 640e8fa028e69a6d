"""The grammars of device rounds: masks of all rows, and accepting of what was chosen.

All answer together where that takes little time. Where it takes long, threads share the work for
some rounds and each grammar is asked by itself, to find the slow ones and charge them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from headstart.backends.base import RoundMasks
from headstart.engine.grammar import BatchGrammar, GuardedGrammar
from headstart.engine.mask_batch import MaskBatch, MaskRows, accept_together
from headstart.engine.mask_threads import MaskThreads

# Seconds of a processor, in all and for each mask, up to which threads are not worth it. On slow
# processors half of the latter goes for Python, which threads cannot share.
_LITTLE, _LITTLE_EACH = 4e-3, 6e-5
# Rounds that threads share after one that took longer; twice as many each time that the next one
# without them takes as long again, since such a round keeps all requests waiting.
_APART, _MOST_APART = 16, 512


class RoundGrammars:
    """What the host does for them, round by round."""

    def __init__(self) -> None:
        self._threads = MaskThreads()
        self._batch: MaskBatch | None = None  # of the round under way
        self._apart = 0  # rounds for which each is still asked by itself
        self._pause = _APART  # such rounds after the next slow one
        self._failed = set[type[BatchGrammar]]()  # kinds of which the log says so
        self._seconds = 0.0  # of a processor that answering together took, in this round

    def accept(self, given: Sequence[tuple[GuardedGrammar | None, Sequence[int]]]) -> list[int]:
        """Move on by tokens that a round gave: `GuardedGrammar.accept_all` of each there is."""
        asked = [(grammar, tokens) for grammar, tokens in given if grammar is not None]
        if not asked:
            return [0] * len(given)
        if self._apart:
            found = [grammar.accept_all(tokens) for grammar, tokens in asked]
        else:
            started = time.thread_time()
            found = accept_together(asked)
            self._seconds += time.thread_time() - started
        counts = iter(found)
        return [0 if grammar is None else next(counts) for grammar, _ in given]

    def begin(self, grammars: Mapping[int, GuardedGrammar], rows: MaskRows) -> None:
        """Begin with what may come next of each, by index; `masks` goes on from there.

        Until then no other thread may use these grammars.
        """
        if self._apart:
            self._threads.begin(list(grammars.values()))
            return
        started = time.thread_time()
        self._batch = MaskBatch(grammars, rows, self._failed)
        self._seconds += time.thread_time() - started

    def masks(
        self, asked: Mapping[int, tuple[GuardedGrammar, Sequence[int]]], rows: MaskRows
    ) -> RoundMasks:
        """What is allowed behind 0, 1, ... drafts of each, by index."""
        try:
            result = self._found(asked, rows)
            is_slow = self._seconds > max(_LITTLE, _LITTLE_EACH * len(result.requests))
        finally:
            self.finish()
        if is_slow:
            self._apart, self._pause = self._pause, min(2 * self._pause, _MOST_APART)
        elif self._apart:
            self._apart -= 1
        else:
            self._pause = _APART
        return result

    def _found(
        self, asked: Mapping[int, tuple[GuardedGrammar, Sequence[int]]], rows: MaskRows
    ) -> RoundMasks:
        if self._batch is None and not self._apart:
            self.begin({index: grammar for index, (grammar, _) in asked.items()}, rows)
        if self._batch is not None:
            started = time.thread_time()
            self._batch.follow({index: drafts for index, (_, drafts) in asked.items()})
            self._seconds += time.thread_time() - started
        others = [index for index in asked if index not in rows.ends]
        found = self._threads.words([asked[index] for index in others])
        for index, masks in zip(others, found, strict=True):
            rows.add(index, masks)
        return rows.of(asked)

    def finish(self) -> None:
        """Nothing of a round is under way any more."""
        self._batch, self._seconds = None, 0.0
        self._threads.finish()
