"""A server from start to end: listen, load, answer, drain, stop.

SIGTERM (or Ctrl-C) drains: running requests are finished within a limit, new ones get a 503. A
second one stops at once. When the engine fails for good, every open request gets an error and the
process ends with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

import headstart
from headstart.engine.engine import Engine
from headstart.engine.options import MAX_DRAFTS, MENU
from headstart.errors import MissingExtra, RequestError
from headstart.learn.supervisor import Learning
from headstart.server.app import create_app
from headstart.server.intake import ANY_NAME, give_back
from headstart.server.options import ServerOptions, is_public, url_of
from headstart.server.refusals import stopped
from headstart.server.rehearsal import rehearse
from headstart.server.state import ServerState
from headstart.server.wire import GuardedConnection

_log = logging.getLogger("headstart.server")
_STOP_SECONDS = 10.0  # for the step that is running when the server ends
_WATCH_SECONDS = 1.0
_ERROR_SECONDS = 1.0  # for errors to reach clients before the process ends
# The engine's thread lets the event loop in after this time of Python; the usual 5 ms come several
# times in one answer.
_SWITCH_SECONDS = 0.001
_HEADER_BYTES = 1 << 16
_IDLE_SECONDS = 30
_BATCHES = (1, 4, 16, 64)  # shown in the table of costs


class _Server(uvicorn.Server):
    """uvicorn's server, with our meaning of signals."""

    on_signal: Callable[[int], None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.on_signal(sig)


class Serving:
    """One run of a server; `run` returns the exit code."""

    def __init__(
        self, model: str, options: ServerOptions, make_engine: Callable[[], Engine],
        listener: socket.socket, *, is_eager: bool = False, learning: Learning | None = None,
    ):  # fmt: skip
        """With `is_eager` the compiler of grammars starts before a request needs it."""
        self.options, self._is_eager = options, is_eager
        self._listener, self.url = listener, url_of(listener, options)
        self.state = ServerState(
            model, options, make_engine, is_public=is_public(listener), learning=learning
        )
        self._signals: list[int] = []
        self._was_ready = False
        self._code, self._reason = 0, ""

    def run(self) -> int:
        asyncio.run(self._serve())
        if self.state.worker.failure is not None and not self._was_ready:
            raise self.state.worker.failure  # a model that cannot be loaded: the caller prints it
        return self._code

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = _Server(self._config())
        self._server.on_signal = self.signal
        self.state.worker.start(self._changed)
        watch = asyncio.create_task(self._watch())
        await self._server.serve(sockets=[self._listener])
        watch.cancel()
        # A model that is still being loaded is not waited for: no request depends on it.
        wait = _STOP_SECONDS if self._was_ready else 0.0
        if not await asyncio.to_thread(self.state.worker.stop, wait) and self._was_ready:
            _log.error("the engine's last step did not end within %g s", wait)
            self._end(1, f"the engine's last step did not end within {wait:g} s")
        self.state.close()
        self._log_end()

    def _log_end(self) -> None:
        level = logging.INFO if self._code == 0 else logging.WARNING
        _log.log(level, "stopped (%s): %s", self._reason, self.state.tally)

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            create_app(self.state), log_config=None, log_level="warning", access_log=False,
            lifespan="off", ws="none",
            http=GuardedConnection, server_header=False,
            limit_concurrency=self.options.max_connections, timeout_keep_alive=_IDLE_SECONDS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=int(_ERROR_SECONDS) + 1,
            ssl_certfile=self.options.ssl_certfile, ssl_keyfile=self.options.ssl_keyfile,
        )  # fmt: skip

    def _changed(self) -> None:
        """The engine is ready, or it is gone."""
        self.state.readings.state = self.state.health
        if self.state.worker.failure is None:
            self._was_ready = True
            assert self.state.worker.engine is not None
            self._announce(self.state.worker.engine)
            return
        if self._was_ready:
            _log.error("the engine is gone, the server ends", exc_info=self.state.worker.failure)
        self._end(1, "the engine failed" if self._was_ready else "the model could not be loaded")

    def _announce(self, engine: Engine) -> None:
        """What was decided, and where to ask."""
        for line in startup_lines(engine, self.state.names[0]):
            _log.info(line)
        if self.state.is_public and not self.options.api_keys:
            _log.warning("%s can be reached by others and there is no --api-key", self.options.host)
        self._warming = asyncio.create_task(self._warm_up())

    async def _warm_up(self) -> None:
        """Be ready when the first request is as fast as the hundredth."""
        if self._is_eager:
            try:
                await self.state.warm_up()
            except (MissingExtra, RequestError) as error:
                _log.info("requests with a grammar are refused: %s", error)
            except Exception:
                _log.warning("grammars could not be tried", exc_info=True)
            await rehearse(self.state)
        self.state.gate.is_open = True
        self.state.readings.state = self.state.health
        names = ", ".join([*self.state.names, ANY_NAME])
        _log.info("ready at %s, the model's names are %s", self.url, names)

    def signal(self, number: int) -> None:
        """The first drains, the second stops; safe in any thread and in a signal handler."""
        self._signals.append(number)
        first = len(self._signals) == 1
        self._loop.call_soon_threadsafe(self._begin_draining if first else self._stop_now)

    def _begin_draining(self) -> None:
        self.state.gate.is_draining = True
        self.state.readings.state = self.state.health
        if not self.state.worker.is_ready:
            self._end(0, f"{self._signal_name} while loading")
            return
        _log.info(
            "draining: %d answers have %g s; another signal ends them now",
            self.state.gate.num_open,
            self.options.drain_seconds,
        )
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self.state.gate.wait_empty(), self.options.drain_seconds)
        except TimeoutError:
            self._cut_off()
            limit = f"{self.options.drain_seconds:g} s"
            self._end(1, f"{self._signal_name}, and not all answers were complete after {limit}")
        else:
            self._end(0, f"{self._signal_name}, all answers were complete")

    def _stop_now(self) -> None:
        self._cut_off()
        self._end(128 + self._signals[-1], f"a second {self._signal_name}")

    @property
    def _signal_name(self) -> str:
        return signal.Signals(self._signals[-1]).name

    def _cut_off(self) -> None:
        self.state.cut_off(stopped())

    def _end(self, code: int, reason: str) -> None:
        """The first ending counts, unless it is a good one and a failure follows."""
        if not self._reason or (self._code == 0 and code != 0):
            self._code, self._reason = code, reason
        self._server.should_exit = True

    async def _watch(self) -> None:
        """A step that never ends must not become a server that never answers."""
        limit, state = self.options.step_timeout_seconds, self.state
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if state.bodies.large.are_over(is_idle=state.gate.num_open == 0):
                await asyncio.to_thread(give_back)
            state.readings.sample()
            started = state.worker.step_started
            if started is None or time.perf_counter() - started < limit:
                continue
            _log.error("a step of the engine takes over %g s, the server ends", limit)
            self._cut_off()
            await asyncio.sleep(_ERROR_SECONDS)
            self._code, self._reason = 1, f"a step of the engine took over {limit:g} s"
            self._log_end()
            os._exit(1)  # the engine's thread cannot be ended otherwise


def serve(
    model: str, options: ServerOptions, make_engine: Callable[[], Engine],
    listener: socket.socket, learning: Learning | None = None,
) -> int:  # fmt: skip
    """Run until a signal; returns the exit code. The log is configured by the caller."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):
        serving = Serving(model, options, make_engine, listener, is_eager=True, learning=learning)
        return serving.run()
    return 130


def startup_lines(engine: Engine, model_name: str) -> list[str]:
    """One fact a line; the last ones say how many tokens are drafted."""
    model = engine.model
    kind, longest = model.checkpoint.config.model_type, engine.admission.longest
    limit = " (as much as K/V memory holds)" if longest < model.max_len else ""
    return [
        f"headstart {headstart.__version__} serves {model_name}: {kind}, {model.dtype} on "
        f"{model.device}, prompt and answer up to {longest} tokens{limit}",
        _head_line(engine),
        *engine.notes,
        f"up to {engine.options.num_requests} answers at once, "
        f"{engine.options.num_rows} rows per trunk pass",
        *_speculation_lines(engine),
    ]


def _head_line(engine: Engine) -> str:
    if engine.model.head is not None:
        return "head: complete and loaded"
    if not engine.options.runs_head:
        return f"head: not loaded, speculate is {engine.options.speculate}"
    return "head: none"


def _speculation_lines(engine: Engine) -> list[str]:
    speculation, options = engine.policy, engine.options
    if speculation is None:
        return ["drafts: none"]
    if options.speculate_off_above is not None:
        limit = f", none while more than {options.speculate_off_above} answers run"
    else:
        limit = ""
    if not options.is_automatic:
        return [f"drafts: {options.speculate} per round unless a request says otherwise{limit}"]
    kind = "auto, by the head and copied" if options.speculate == "auto" else "copied"
    lines = [f"drafts: {kind}, 0 to {MAX_DRAFTS} per round{limit}; a round takes (profiled)"]
    for batch in (b for b in _BATCHES if b <= options.num_requests):
        costs = [
            f"K={drafts} {1e3 * seconds:.2f} ms"
            for drafts in MENU
            if (seconds := speculation.round_seconds(batch, drafts)) is not None
        ]
        lines.append(f"  {batch:>2} running: " + ", ".join(costs))
    return lines
