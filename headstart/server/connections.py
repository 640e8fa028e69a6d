"""Connections that never finish their headers, or never read their answer, are closed.

Each would hold a place, and the second kind a whole answer, for ever. uvicorn bounds the size of
headers and the time between requests; not the time for headers, nor how long an answer waits.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
STALL_SECONDS = 20.0  # in which a client must take this much of what waits for it, or all
_LEAST_BYTES = 1 << 18


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
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._judge, waiting)

    def _judge(self, waited: int) -> None:
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
