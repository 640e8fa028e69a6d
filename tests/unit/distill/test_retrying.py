"""When a request is tried again, how long after, and when not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from headstart.distill.retrying import Refused, RetryingClient, pause
from headstart.errors import ServerError

REAL_SLEEP = asyncio.sleep  # tests replace it


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


def ask(
    *replies: httpx.Response | Exception, retries: int = 5, seconds: float = 600.0
) -> dict[str, Any]:
    left: Iterator[httpx.Response | Exception] = iter(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        reply = next(left)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def go() -> dict[str, Any]:
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://s/v1/") as client:
            return await RetryingClient(client, retries, seconds=seconds).post(
                "chat/completions", {}
            )

    return asyncio.run(go())


GOOD = httpx.Response(200, json={"fine": 1})


def test_waits_grow_and_differ(waits: list[float]) -> None:
    assert ask(*[httpx.Response(500)] * 4, GOOD) == {"fine": 1}
    assert len(waits) == 4
    for attempt, seconds in enumerate(waits):
        assert 0.25 * 2**attempt <= seconds <= 0.75 * 2**attempt
    assert len({pause(3) for _ in range(5)}) == 5
    assert pause(50) <= 90


def test_the_server_says_how_long_to_wait(waits: list[float]) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    headers = ["17", date, "0", "99999999", "soon"]
    ask(*[httpx.Response(429, headers={"Retry-After": value}) for value in headers], GOOD)
    assert waits[0] == 17
    assert 95 < waits[1] <= 100
    assert waits[2:4] == [0, 600]
    assert 4 <= waits[4] <= 12  # nonsense: as if it had said nothing


@pytest.mark.parametrize(
    "failure",
    [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("gone"),
     httpx.Response(503), httpx.Response(408), httpx.Response(200, text="<html>"),
     httpx.Response(200, json=[1])],
    ids=["refused", "timeout", "dropped", "503", "408", "not JSON", "not an object"],
)  # fmt: skip
def test_what_may_pass_is_tried_again(
    failure: httpx.Response | Exception, waits: list[float]
) -> None:
    assert ask(failure, GOOD) == {"fine": 1}
    with pytest.raises(ServerError, match=r"http://s/v1/ failed 1 times, last with .*are kept"):
        ask(failure, retries=0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_is_final(status: int, waits: list[float]) -> None:
    with pytest.raises(Refused, match=f"{status}: too long") as caught:
        ask(httpx.Response(status, json={"error": {"message": "too\nlong"}}))
    assert caught.value.status == status
    assert waits == []


class Endless(httpx.AsyncByteStream):
    """An answer without an end: quick and large, or slow and small."""

    def __init__(self, part: bytes, pause: float):
        self.part, self.pause = part, pause
        self.num_parts = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.num_parts += 1
            yield self.part
            await REAL_SLEEP(self.pause)


def test_an_answer_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.distill.retrying._MOST_BYTES", 10_000)
    stream = Endless(b"x" * 1000, 0)
    with pytest.raises(ServerError, match="more than 10,000 bytes"):
        ask(httpx.Response(200, stream=stream))
    assert stream.num_parts == 11


def test_an_answer_that_takes_too_long_is_tried_again(waits: list[float]) -> None:
    slow = httpx.Response(200, stream=Endless(b" ", 0.01))
    assert ask(slow, GOOD, seconds=0.1) == {"fine": 1}
    with pytest.raises(ServerError, match=r"last with no whole answer in 0\.1 s"):
        ask(httpx.Response(200, stream=Endless(b" ", 0.01)), retries=0, seconds=0.1)


def test_an_answer_that_nests_without_end_is_no_answer(waits: list[float]) -> None:
    deep = httpx.Response(200, content=b"[" * 100_000)
    assert ask(deep, GOOD) == {"fine": 1}
