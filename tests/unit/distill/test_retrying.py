"""When a request is tried again, how long after, and when not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from headstart.distill.retrying import Refused, RetryingClient, pause
from headstart.errors import ServerError


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


def ask(*replies: httpx.Response | Exception, retries: int = 5) -> dict[str, Any]:
    left: Iterator[httpx.Response | Exception] = iter(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        reply = next(left)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def go() -> dict[str, Any]:
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://s/v1/") as client:
            return await RetryingClient(client, retries).post("chat/completions", {})

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
