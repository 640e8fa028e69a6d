"""Who is let in: counts answers in progress, refuses when there are too many or none may come.

Counted on the event loop from the moment a request is understood, so that neither a burst nor slow
prompts can build a queue that nobody sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from headstart.errors import RequestError
from headstart.server.refusals import queue_full, unavailable
from headstart.server.worker import Worker

_SMOOTHING = 0.1  # of a new duration in the mean that Retry-After is made from
_LONGEST_RETRY = 60


class Gate:
    def __init__(self, worker: Worker, *, max_queue: int):
        self._worker, self._max_queue = worker, max_queue
        self._mean_seconds = 1.0
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_open = 0  # answers
        self.is_draining = False

    def check(self) -> None:
        """Raise unless a new request can be answered at all."""
        if self._worker.failure is not None:
            raise unavailable("the engine has failed and the server ends.", code="engine_dead")
        if self.is_draining:
            raise unavailable("the server is shutting down; ask another one.", code="draining")
        if not self._worker.is_ready:
            raise unavailable("the model is being loaded; try again soon.", code="loading")

    @contextmanager
    def entry(
        self, num_answers: int, *, is_timed: bool = True, field: str | None = None
    ) -> Iterator[None]:
        """Hold places for a request, or refuse it; Retry-After is made of those that are timed.

        `field` is the one that asks for so many answers.
        """
        assert num_answers > 0, num_answers
        self.check()
        engine = self._worker.engine
        assert engine is not None
        running = engine.options.max_running_requests
        places = running + self._max_queue
        if num_answers > places:
            raise RequestError(
                f"the request wants {num_answers} answers and this server has {places} places. "
                "Ask for fewer.",
                field=field,
            )
        if self.num_open + num_answers > places:
            wait = self._mean_seconds * self.num_open / running
            raise queue_full(self.num_open, min(max(1, ceil(wait)), _LONGEST_RETRY))
        self.num_open += num_answers
        self._empty.clear()
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            yield
        finally:
            self.num_open -= num_answers
            if not self.num_open:
                self._empty.set()
            if is_timed:
                self._mean_seconds += _SMOOTHING * (clock() - started - self._mean_seconds)

    async def wait_empty(self) -> None:
        await self._empty.wait()
