"""Every answer is counted and logged, whoever gave it, and one is given where a route failed.

Plain ASGI: streams pass untouched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.engine.outputs import Result
from headstart.server.logs import RequestRecord, log_request
from headstart.server.metrics import ServerMetrics
from headstart.server.refusals import refusal_of
from headstart.server.stream import send_refusal

_log = logging.getLogger("headstart.server")
_NOTE = "headstart.note"
_QUIET = ("/health", "/metrics")  # asked every few seconds; counted, not logged
_GONE = 499  # the client went away before the answer began


@dataclass
class Note:
    """What is known about a request while it is answered."""

    arrived: float = field(default_factory=time.perf_counter)
    id: str = "-"
    first_token: float | None = None
    results: Sequence[Result] = ()
    is_stream: bool = False
    error: str | None = None
    prompt: Any = None


def note_of(scope: Scope) -> Note:
    note: Note = scope.setdefault(_NOTE, Note())
    return note


class Observed:
    def __init__(self, app: ASGIApp, metrics: ServerMetrics, model: str):
        self._app, self._metrics, self._model = app, metrics, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note, status = note_of(scope), _GONE

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            refusal = refusal_of(error)
            note.error = refusal.message
            if status != _GONE:  # an answer that has begun cannot become another one
                raise
            if refusal.status == 500:
                _log.error("%s %s failed", scope["method"], scope["path"][:80], exc_info=error)
            await send_refusal(watch, refusal)
        finally:
            seconds = time.perf_counter() - note.arrived
            route = getattr(scope.get("route"), "path", None)
            self._metrics.http_request(route, scope["method"], status, seconds)
            if route not in _QUIET:
                log_request(self._record(scope, note, route, status, seconds))

    def _record(
        self, scope: Scope, note: Note, route: str | None, status: int, seconds: float
    ) -> RequestRecord:
        first = note.first_token - note.arrived if note.first_token is not None else None
        client = scope.get("client")
        return RequestRecord(
            id=note.id, route=route or scope["path"][:80], status=status, model=self._model,
            client=client[0] if client else None, seconds=seconds, first_token_seconds=first,
            results=note.results, is_stream=note.is_stream, error=note.error, prompt=note.prompt,
        )  # fmt: skip
