"""Everything that routes share, made once per server: options, worker, places, thread pools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headstart.checkpoint.local_paths import shown
from headstart.engine.engine import Engine
from headstart.learn.supervisor import Learning
from headstart.server.grammars.specs import GrammarSpec
from headstart.server.grammars.token_grammar import TokenGrammar
from headstart.server.intake import BodyReader, Gate
from headstart.server.learned import attach
from headstart.server.metrics.exposition import MetricsPage
from headstart.server.metrics.readings import Health, Readings
from headstart.server.metrics.series import Series
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions
from headstart.server.recording import ServerMetrics
from headstart.server.refusals import STOPPED, TIMED_OUT, Refusal
from headstart.server.worker import Worker

_MOST_THREADS = 4  # for prompts, templates and grammars; the engine needs the cores more


@dataclass
class Tally:
    """Requests that could be answered; those that were refused are in the metrics."""

    finished: int = 0
    aborted: int = 0  # the client went away, time was up, or the server was stopped
    failed: int = 0

    def count(self, refusal: Refusal) -> None:
        """One that ended with this error."""
        self.aborted += refusal.code in (TIMED_OUT, STOPPED)
        self.failed += refusal.status == 500

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished} requests finished, {self.aborted} aborted{failed}"


class ServerState:
    """Options, the engine's thread, places for answers, thread pools, and the loaded model."""

    model: ServedModel  # from the moment on that the worker is ready

    def __init__(
        self, model: str, options: ServerOptions, make_engine: Callable[[], Engine], *,
        is_public: bool, learning: Learning | None = None,
    ):  # fmt: skip
        self.options, self.is_public, self.learning = options, is_public, learning
        self.root = shown(model)
        self.names: Sequence[str] = options.served_model_name or [self.root]
        series = Series(self.names[0])
        self.metrics, self.readings = ServerMetrics(series), Readings()
        self.metrics_page = MetricsPage(series, self.readings)
        self.worker = Worker(lambda: self._load(make_engine), self.metrics)
        self.gate = Gate(self.worker, max_queue=options.max_queue)
        self.tally = Tally()
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        # For what would hold up the event loop; its queue is bounded as open requests are.
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        # Grammars may take seconds to compile: prompts must not wait for them.
        self._grammar_pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="grammar")
        # /tokenize may be of megabytes: answers must not wait for it.
        self.token_pool = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._metrics_pool = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._next_page: asyncio.Task[tuple[bytes, str]] | None = None
        self._page_lock = asyncio.Lock()
        self.bodies = BodyReader(options.max_body_bytes, self.pool)

    @property
    def health(self) -> Health:
        if self.worker.failure is not None:
            return "dead"
        if self.gate.is_draining:
            return "draining"
        return "ready" if self.worker.is_ready and self.gate.is_open else "starting"

    def _load(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        engine.warm_up()
        self.model = ServedModel(engine, self.names, self.root, self.options)
        self.readings.attach(engine, num_queued=lambda: self.worker.num_queued)
        if self.learning is not None:
            attach(self.learning, self.worker, engine)
            self.readings.learning = self.learning
        return engine

    async def compiled(self, spec: GrammarSpec) -> TokenGrammar:
        """A grammar, compiled in a pool of its own: it may take seconds."""
        pool = self.pool if self.model.is_compiled(spec) else self._grammar_pool
        return await asyncio.get_running_loop().run_in_executor(pool, self.model.compile, spec)

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
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._metrics_pool, self.metrics_page.render)

    async def warm_up(self) -> None:
        """Wait for what compiles grammars, so that the first request with one does not."""
        await asyncio.get_running_loop().run_in_executor(self._grammar_pool, self.model.warm_up)

    def cut_off(self, error: Exception) -> None:
        """End every request with an error, whatever the engine and the templates are doing."""
        self.worker.fail_all(error)
        if self.worker.engine is not None:
            self.model.close_templates()

    def close(self) -> None:
        if self.learning is not None:
            self.learning.close()
        for pool in (self.pool, self._grammar_pool, self.token_pool, self._metrics_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.worker.engine is not None:
            self.model.close()
