"""A client that costs little: one protocol per request, only first and last events are parsed.

Events are not taken apart while they come. The first that holds a token is looked for, then only
the end; the number of tokens is the server's own `usage`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from over_http.load import Job

_TAIL = 4096  # bytes that hold the last events of an answer
_END = b"data: [DONE]"
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_FINISH = re.compile(rb'"finish_reason":\s*"(\w+)"')
_CONTENT = re.compile(rb'"content":\s*"[^"]|"tool_calls":\s*\[\s*\{')


@dataclass(frozen=True)
class Answer:
    """One answer; times in seconds by the same clock. `error` where there is none."""

    sent: float
    first: float
    ended: float
    tokens: int
    finish: str = ""
    text: str = ""
    error: str = ""

    @property
    def first_token_seconds(self) -> float:
        return self.first - self.sent

    @property
    def token_seconds(self) -> float | None:
        """Per output token after the first; None for an answer of one."""
        return (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, ended: asyncio.Future[Answer], keeps_text: bool):
        self._request, self._ended, self._keeps_text = request, ended, keeps_text
        self._head, self._tail = b"", b""
        self._pieces: list[bytes] = []
        self._sent = self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._first:
            self._head += data
            if has_token(self._head):
                self._first = time.perf_counter()
        if self._keeps_text:
            self._pieces.append(data)
        self._tail = data if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        if _END in self._tail[-64:]:
            self._finish(time.perf_counter())
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            said = self._head[-600:].decode(errors="replace") or str(error or "nothing came")
            self._ended.set_result(Answer(self._sent, 0, time.perf_counter(), 0, error=said))

    def _finish(self, now: float) -> None:
        if self._ended.done():
            return
        tokens, finish = _TOKENS.findall(self._tail), _FINISH.findall(self._tail)
        self._ended.set_result(
            Answer(
                self._sent, self._first or now, now, int(tokens[-1]) if tokens else 0,
                finish=finish[-1].decode() if finish else "",
                text=text_of(b"".join(self._pieces)) if self._keeps_text else "",
                error="" if tokens else f"no usage: {self._tail[-300:]!r}",
            )
        )  # fmt: skip


def has_token(head: bytes) -> bool:
    """Whether an event with a token has begun; a chat's first event may hold a role alone."""
    events = head.split(b"data: ")[1:]
    return any(b'"role"' not in event or _CONTENT.search(event) for event in events)


def text_of(answer: bytes) -> str:
    """The text of a streamed chat, from the raw response."""
    parts = []
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            with suppress(ValueError, KeyError, IndexError):
                parts.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    return "".join(parts)


def request_bytes(job: Job) -> bytes:
    body = job.body
    head = (
        f"POST {job.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, request: bytes, *, keeps_text: bool = False) -> Answer:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Answer] = loop.create_future()
    try:
        transport, _ = await loop.create_connection(
            lambda: _Stream(request, ended, keeps_text), "127.0.0.1", port
        )
    except OSError as error:
        now = time.perf_counter()
        return Answer(now, 0, now, 0, error=str(error))
    try:
        return await ended
    finally:
        transport.abort()


async def _converse(port: int, job: Job, request: bytes, keep: Callable[[Answer], None]) -> None:
    """A request, and the later turns of its chat with the answers that came."""
    answer = await ask(port, request, keeps_text=bool(job.later))
    keep(answer)
    while job.later and not answer.error:
        job = job.next_turn(answer.text)
        answer = await ask(port, request_bytes(job), keeps_text=bool(job.later))
        keep(answer)


async def closed_loop(
    port: int, jobs: list[Job], streams: int, seconds: float
) -> tuple[list[Answer], float]:
    """Each stream asks again when it is answered; also returns when the last request began.

    After `seconds` no request begins any more.
    """
    waiting: Iterator[tuple[Job, bytes]] = iter([(job, request_bytes(job)) for job in jobs])
    answers: list[Answer] = []
    began = last = time.perf_counter()

    async def stream() -> None:
        nonlocal last
        for job, request in waiting:
            last = time.perf_counter()
            if last - began > seconds:
                return
            await _converse(port, job, request, answers.append)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return answers, last


async def arrivals(
    port: int, jobs: list[Job], times: list[float], seconds: float
) -> tuple[list[Answer], float]:
    """Requests at given times after the beginning, however many are under way."""
    ready = [(job, request_bytes(job)) for job in jobs]
    answers: list[Answer] = []
    began = last = time.perf_counter()
    tasks = []
    for number, (job, request) in zip(count(), ready):
        await asyncio.sleep(began + times[number] - time.perf_counter())
        last = time.perf_counter()
        if last - began > seconds:
            break
        tasks.append(asyncio.create_task(_converse(port, job, request, answers.append)))
    await asyncio.gather(*tasks)
    return answers, last
