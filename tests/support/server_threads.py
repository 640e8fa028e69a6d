"""A server inside the test process, in a thread, so that a test can see and break its engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from headstart.engine.engine import Engine
from headstart.server.lifecycle import Serving
from headstart.server.options import ServerOptions, listen
from support.server_runs import HTTP

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}


class Running:
    """A server in a thread; `join` gives its exit code, or raises what it raised."""

    def __init__(self, serving: Serving):
        self.serving, self.url = serving, serving.url
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.status() is not None)

    def _run(self) -> None:
        try:
            self._outcome.append(self.serving.run())
        except BaseException as error:
            self._outcome.append(error)

    def status(self) -> str | None:
        """What /health says; None where there is no answer."""
        try:
            return str(HTTP.get(f"{self.url}/health").json()["status"])
        except httpx.TransportError:
            return None

    def join(self, seconds: float = 15) -> int:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server hangs"
        (outcome,) = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return int(outcome)


@contextmanager
def serving(
    engine: Engine | Callable[[], Engine], *, is_eager: bool = False, **options: Any
) -> Iterator[Running]:
    """Serve an engine on a free port; it is ready when this gives it, if it is there already."""
    make = (lambda: engine) if isinstance(engine, Engine) else engine
    own = ServerOptions(port=0, **options)
    server = Running(Serving("small", own, make, listen(own), is_eager=is_eager))
    if isinstance(engine, Engine):
        wait_until(lambda: server.status() == "ready")
    try:
        yield server
    finally:
        for _ in range(2):
            if server._thread.is_alive():
                server.serving.signal(15)
        server._thread.join(15)
        assert not server._thread.is_alive(), "the server hangs"


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> float:
    """Poll; returns how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - started


def small_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(
        folder,
        **{"speculate": 3, "dtype": "float32", "threads": 1, "kv_bytes": 1 << 23, **settings},
    )


def ask(server: Running, fields: dict[str, Any], **options: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/completions", json=fields, timeout=30, **options)


def is_idle(engine: Engine) -> bool:
    return engine.pool.num_used == 0 and not engine.has_work
