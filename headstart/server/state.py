"""Everything that routes share, made once per server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headstart.engine.engine import Engine
from headstart.server.auth import Keys
from headstart.server.bodies import BodyReader
from headstart.server.gate import Gate
from headstart.server.grammar_specs import GrammarSpec
from headstart.server.grammars import TokenGrammar
from headstart.server.limits import ServerOptions
from headstart.server.metrics import Health, ServerMetrics
from headstart.server.model import ServedModel
from headstart.server.tally import Tally
from headstart.server.worker import Worker

_MOST_THREADS = 4  # for prompts, templates and grammars; the engine needs the cores more


class ServerState:
    """Options, the engine's worker, and who may come in."""

    def __init__(self, model: str, options: ServerOptions, make_engine: Callable[[], Engine]):
        self.options = options
        self.root = model
        self.names: Sequence[str] = options.served_model_name or [model]
        self.metrics = ServerMetrics(self.names[0])
        self.worker = Worker(lambda: self._load(make_engine), self.metrics)
        self.gate = Gate(self.worker, max_queue=options.max_queue)
        self.keys = Keys(options.api_keys)
        self.tally = Tally()
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        # Grammars may take seconds to compile: prompts must not wait for them.
        self._grammar_pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="grammar")
        # Nobody's answer waits for somebody's /tokenize, which may be of megabytes.
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

    def _load(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        self._model = ServedModel(engine, self.names, self.root, self.options)
        return engine

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Work that would hold up the event loop. Who may come in is bounded, so this queue is."""
        return await _in_pool(self._pool, function, *arguments)

    async def in_token_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The same for /tokenize and /detokenize."""
        return await _in_pool(self._token_pool, function, *arguments)

    async def compiled(self, spec: GrammarSpec) -> TokenGrammar:
        """A grammar; compiling may take seconds, for which nobody else's request waits."""
        model = self.model
        pool = self._pool if model.is_compiled(spec) else self._grammar_pool
        grammar: TokenGrammar = await _in_pool(pool, model.compile, spec)
        return grammar

    async def metrics_page(self) -> tuple[bytes, str]:
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
            page: tuple[bytes, str] = await _in_pool(self._metrics_pool, self.metrics.render)
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
