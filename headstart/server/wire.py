"""HTTP around the routes: connections with time limits, answers as bytes, their records.

uvicorn bounds the size of headers and the time between requests; not the time for headers, nor how
long an answer waits to be read. Every answer is counted and logged, and one is given where a route
failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from operator import attrgetter
from typing import Any
from uuid import uuid4

import h11
from pydantic_core import PydanticSerializationError, to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from headstart.server.recording import RequestRecord, ServerMetrics, log_request
from headstart.server.refusals import Refusal, refusal_of

_log = logging.getLogger("headstart.server")
HEADER_SECONDS = 20.0
STALL_SECONDS = 20.0  # in which a client must take this much of what waits for it, or all
_LEAST_BYTES = 1 << 18
_RECORD, _CYCLE = "headstart.record", "headstart.cycle"  # keys of a scope
_QUIET = ("/health", "/load", "/metrics", "/ping")  # asked every few seconds; counted, not logged
_GONE = 499  # the client went away before the answer began
# What parts are written with: names inside uvicorn, which another version may not have.
_OF_CYCLE = attrgetter("flow.write_paused", "disconnected", "response_complete", "transport.write")
DONE = b"data: [DONE]\n\n"
_NAME = re.compile(r"[A-Za-z0-9_.:/=+-]{1,128}")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would collect chunks
]


class GuardedConnection(H11Protocol):
    """uvicorn's connection with time limits for the headers and the reading of every request."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # a part of the headers
            self._arm()
        else:
            self._disarm()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            scope: Scope = self.cycle.scope  # type: ignore[assignment]
            scope[_CYCLE] = weakref.ref(self.cycle)  # which holds the scope

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_watch()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._end_watch()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():  # closed when that is read, if ever
            self._watch()

    def _watch(self) -> None:
        self._end_watch()
        waiting = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._check_progress, waiting)

    def _check_progress(self, waited: int) -> None:
        """Abort, which drops what waits, unless the client has read on."""
        if waited - self.transport.get_write_buffer_size() < _LEAST_BYTES:
            self.transport.abort()
        else:
            self._watch()

    def _end_watch(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _arm(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def record_of(scope: Scope) -> RequestRecord:
    """What is known of the request that a scope belongs to."""
    record: RequestRecord = scope.setdefault(_RECORD, RequestRecord())
    return record


class Observed:
    """Middleware that counts and logs every answer; plain ASGI, so streams pass untouched."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, model: str):
        self._app, self._metrics, self._model = app, metrics, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, status = record_of(scope), _GONE
        record.request_id = _request_id(scope)

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = record.request_id or (record.id if record.id != "-" else uuid4().hex)
                own = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                message = {**message, "headers": own}
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            refusal = refusal_of(error)
            record.error = refusal.message
            if status != _GONE:  # an answer that has begun cannot become another one
                raise
            if refusal.status == 500:
                _log.error("%s %s failed", scope["method"], scope["path"][:80], exc_info=error)
            await send_refusal(watch, refusal, scope["path"])
        finally:
            route, client = getattr(scope.get("route"), "path", None), scope.get("client")
            record.seconds, record.status = time.perf_counter() - record.arrived, status
            record.route, record.model = route or scope["path"][:80], self._model
            record.client = client[0] if client else None
            self._metrics.http_request(route, scope["method"], status, record.seconds)
            if route not in _QUIET:
                log_request(record)


def _request_id(scope: Scope) -> str | None:
    """What a client calls its request, if it is a name."""
    given = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
    return given if _NAME.fullmatch(given) else None


def encoded(document: Any) -> bytes:
    """Compact JSON; what is no character (a lone surrogate in a message) shows as `?`."""
    try:
        return to_json(document)  # a seventh of the time that `json` takes, for every chunk
    except PydanticSerializationError:
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def plain_events(documents: Iterable[Any]) -> bytes:
    return b"".join(b"data: " + encoded(document) + b"\n\n" for document in documents)


def named_events(documents: Iterable[Any]) -> bytes:
    """Events whose name is their document's `type`."""
    return b"".join(
        b"event: " + document["type"].encode() + b"\ndata: " + encoded(document) + b"\n\n"
        for document in documents
    )


async def begin_stream(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})


async def send_part(send: Send, data: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


class PartWriter:
    """Writes parts of a stream that has begun at once, while its client reads as fast.

    A part that is sent with `send_part` goes through a dozen functions of the layers above the
    connection, which takes longer than all else that an event costs.
    """

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    @classmethod
    def of(cls, scope: Scope) -> PartWriter | None:
        """None where parts have no chunks of their own, or where another server runs the app."""
        cycle = scope[_CYCLE]() if _CYCLE in scope else None
        if cycle is None or scope["http_version"] != "1.1":
            return None
        try:
            _OF_CYCLE(cycle)
        except AttributeError:
            return None
        return cls(cycle)

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, data: bytes) -> None:
        """Write a part, which has some bytes."""
        assert data, "a chunk of no bytes would end the answer"
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def send_whole(send: Send, body: bytes) -> None:
    await _send_document(send, 200, body, {})


async def send_refusal(send: Send, refusal: Refusal, path: str) -> None:
    """`path`: of the request, since not all APIs write errors alike."""
    await _send_document(send, refusal.status, encoded(refusal.body_for(path)), refusal.headers)


async def _send_document(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": own + more})
    await send_part(send, body, is_last=True)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work unless the client goes away first; False if it did."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        is_done = task.done()
    finally:
        watcher.cancel()
        task.cancel()  # no effect on one that is done
        await asyncio.gather(task, watcher, return_exceptions=True)
    if is_done:
        task.result()
    return is_done


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
