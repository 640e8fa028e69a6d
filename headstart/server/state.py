"""Everything that routes share, made once per server: options, worker, places, thread pools.

Answers in progress are counted on the event loop from the moment a request is understood: neither
a burst nor slow prompts can build a queue that is not counted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from headstart.engine.engine import Engine
from headstart.errors import RequestError
from headstart.server.bodies import BodyReader
from headstart.server.grammars.compiler import TokenGrammar
from headstart.server.grammars.specs import GrammarSpec
from headstart.server.metrics.exposition import MetricsPage
from headstart.server.metrics.recorder import Health, ServerMetrics
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions
from headstart.server.refusals import Refusal, queue_full, unavailable
from headstart.server.worker import Worker

_SMOOTHING = 0.1  # of a new duration in the mean that Retry-After is made from
_LONGEST_RETRY = 60
ANY_NAME = "default"  # of the model, always accepted
_MOST_THREADS = 4  # for prompts, templates and grammars; the engine needs the cores more


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


@dataclass
class Tally:
    """Requests that could be answered; those that were refused are in the metrics."""

    finished: int = 0
    aborted: int = 0  # the client went away, time was up, or the server was stopped
    failed: int = 0

    def count(self, status: int, *, is_stopped: bool) -> None:
        """One that ended with an error of this status."""
        self.aborted += status == 408 or is_stopped
        self.failed += status == 500

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished} requests finished, {self.aborted} aborted{failed}"


class ServerState:
    """Options, the engine's thread, places for answers, thread pools, and the loaded model."""

    def __init__(self, model: str, options: ServerOptions, make_engine: Callable[[], Engine]):
        self.options = options
        self.root = model
        self.names: Sequence[str] = options.served_model_name or [model]
        self.metrics = ServerMetrics(self.names[0])
        self.metrics_page = MetricsPage(self.metrics)
        self.worker = Worker(lambda: self._load(make_engine), self.metrics)
        self.gate = Gate(self.worker, max_queue=options.max_queue)
        self.tally = Tally()
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        # Grammars may take seconds to compile: prompts must not wait for them.
        self._grammar_pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="grammar")
        # /tokenize may be of megabytes: answers must not wait for it.
        self._token_pool = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._metrics_pool = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._next_page: asyncio.Task[tuple[bytes, str]] | None = None
        self._page_lock = asyncio.Lock()
        self.bodies = BodyReader(options.max_body_bytes, self.in_thread)
        self._model: ServedModel | None = None

    @property
    def health(self) -> Health:
        if self.worker.failure is not None:
            return "dead"
        if self.gate.is_draining:
            return "draining"
        return "ready" if self.worker.is_ready else "starting"

    @property
    def model(self) -> ServedModel:
        """The model, or a Refusal while there is none to ask."""
        self.gate.check()
        assert self._model is not None
        return self._model

    def check_name(self, name: str | None) -> None:
        """Refusal for a name that is not one of the model's."""
        if name is not None and name != ANY_NAME and name not in self.names:
            known = ", ".join(self.names)
            raise Refusal(
                404, f"no model is called {name[:80]!r}; this server has {known} (also as "
                f"{ANY_NAME}).", param="model", code="model_not_found",
            )  # fmt: skip

    def _load(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        self._model = ServedModel(engine, self.names, self.root, self.options)
        return engine

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Work that would hold up the event loop; the queue is bounded as open requests are."""
        return await _in_pool(self._pool, function, *arguments)

    async def in_token_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The same for /tokenize and /detokenize."""
        return await _in_pool(self._token_pool, function, *arguments)

    async def compiled(self, spec: GrammarSpec) -> TokenGrammar:
        """A grammar, compiled in a pool of its own: it may take seconds."""
        model = self.model
        pool = self._pool if model.is_compiled(spec) else self._grammar_pool
        grammar: TokenGrammar = await _in_pool(pool, model.compile, spec)
        return grammar

    async def rendered_metrics(self) -> tuple[bytes, str]:
        """Body and content type of GET /metrics, rendered in a thread, one at a time.

        Requests that arrive during a rendering share the next one: however many there are, each
        waits for two at most, and what it gets was read after it arrived.
        """
        if self._next_page is None:
            self._next_page = asyncio.create_task(self._rendered())
        return await asyncio.shield(self._next_page)

    async def _rendered(self) -> tuple[bytes, str]:
        async with self._page_lock:
            self._next_page = None
            page: tuple[bytes, str] = await _in_pool(self._metrics_pool, self.metrics_page.render)
            return page

    async def warm_up(self) -> None:
        await _in_pool(self._grammar_pool, self.model.warm_up)

    def close(self) -> None:
        for pool in (self._pool, self._grammar_pool, self._token_pool, self._metrics_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._model is not None:
            self._model.close()


async def _in_pool(pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
