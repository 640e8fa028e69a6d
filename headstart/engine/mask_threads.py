"""The masks of all grammars of a round, by as many threads as there is work for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headstart.engine.grammar import GuardedGrammar

Masks = list[np.ndarray | None]  # behind 0, 1, ... drafts, as `GuardedGrammar.words` gives them
_MOST = 16
# Seconds of work for which a thread is woken: threads take Python's lock in turns between grammars,
# and the engine's own may wait for it longer than the work of a few cheap ones takes.
_WORTH = 1e-3


class MaskThreads:
    """Some masks take microseconds and others a millisecond, which the last round shows."""

    def __init__(self) -> None:
        self._helpers = min(_MOST, len(os.sched_getaffinity(0))) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # of a processor, in the last round

    def words(self, asked: Sequence[tuple[GuardedGrammar, Sequence[int]]]) -> list[Masks]:
        """`GuardedGrammar.words` of each grammar and its drafts."""
        found: list[Masks] = [[] for _ in asked]
        shared = [i for i, (grammar, _) in enumerate(asked) if grammar.is_threaded]
        rest = iter(shared)  # taken from by all threads: the interpreter lock keeps it whole

        def work(mine: Iterator[int]) -> float:
            started = time.thread_time()
            for index in mine:
                grammar, drafts = asked[index]
                found[index] = grammar.words(drafts)
            return time.thread_time() - started

        wanted = min(self._helpers, len(shared) - 1, int(self._seconds / _WORTH))
        if wanted > 0 and self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="masks")
        helping = [self._pool.submit(work, rest) for _ in range(wanted)] if self._pool else []
        seconds = work(rest)
        work(iter([i for i, (grammar, _) in enumerate(asked) if not grammar.is_threaded]))
        self._seconds = seconds + sum(each.result() for each in helping)
        return found
