"""Masks of grammars one by one, by as many threads as there is work for.

Most masks take microseconds, and those of some grammars milliseconds. What may come next is known
before there are drafts, so that is computed while the device still drafts. What follows drafts is
computed when they have come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from headstart.engine.grammar import GuardedGrammar
from headstart.engine.mask_batch import Masks

_Asked = Sequence[tuple[GuardedGrammar, Sequence[int]]]
_MOST = 16
# Seconds of work for which a thread is woken: threads take Python's lock in turns between grammars,
# and the engine's own may wait for it longer than the work of a few cheap ones takes.
_WORTH = 1e-3
_FADING = 0.9  # what a round's work counts for in the next: slow masks come now and then


@dataclass
class _Work:
    """Grammars that threads take one after another; the interpreter lock keeps `rest` whole."""

    asked: _Asked
    rest: Iterator[int]
    found: list[Masks]
    helping: list[Future[float]] = field(default_factory=list)

    def run(self) -> float:
        """Take what is left; seconds of a processor that it took."""
        started = time.thread_time()
        for index in self.rest:
            grammar, drafts = self.asked[index]
            self.found[index] = grammar.words(drafts)
        return time.thread_time() - started

    def finish(self) -> float:
        """Take what is left and wait for the threads; processor seconds of all."""
        return self.run() + sum(each.result() for each in self.helping)


class MaskThreads:
    """How many threads help is decided by what the last rounds took."""

    def __init__(self) -> None:
        self._helpers = min(_MOST, len(os.sched_getaffinity(0))) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # of a processor, in the last rounds,
        self._later_seconds = 0.0  # and of these for what follows drafts
        self._begun: _Work | None = None

    def begin(self, grammars: Sequence[GuardedGrammar]) -> None:
        """Let threads compute what may come next, if that is worth it; `words` goes on from there.

        Until then no other thread may use these grammars.
        """
        shared = [(grammar, ()) for grammar in grammars if grammar.is_threaded]
        wanted = self._num_helping(self._seconds, len(shared))
        if wanted > 0:
            self._begun = self._start(shared, range(len(shared)), wanted)

    def words(self, asked: _Asked) -> list[Masks]:
        """`GuardedGrammar.words` of each grammar and its drafts."""
        begun = self.finish()
        expected = self._later_seconds if begun else self._seconds
        shared = [i for i, (grammar, _) in enumerate(asked) if grammar.is_threaded]
        own = [i for i, (grammar, _) in enumerate(asked) if not grammar.is_threaded]
        work = self._start(asked, shared, self._num_helping(expected, len(shared) - 1))
        later = work.finish()
        _Work(asked, iter(own), work.found).run()
        if begun:
            self._later_seconds = max(later, _FADING * self._later_seconds)
        self._seconds = max(begun + later, _FADING * self._seconds)
        return work.found

    def finish(self) -> float:
        """Wait for what was begun; seconds of a processor that it took."""
        begun, self._begun = self._begun, None
        return begun.finish() if begun is not None else 0.0

    def _num_helping(self, seconds: float, most: int) -> int:
        return max(0, min(self._helpers, most, int(seconds / _WORTH)))

    def _start(self, asked: _Asked, indices: Sequence[int], helping: int) -> _Work:
        work = _Work(asked, iter(indices), [[] for _ in asked])
        if helping > 0:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="masks")
            work.helping = [self._pool.submit(work.run) for _ in range(helping)]
        return work
