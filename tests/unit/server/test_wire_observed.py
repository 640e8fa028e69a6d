"""Every answer is counted and logged for what it was, also where a route failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.types import Message

from headstart.errors import MissingExtra
from headstart.server.wire import Observed


class Counted:
    """Metrics that keep what they get of answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []

    def http_request(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.answers.append((handler, method, status))


def observed(counted: Counted) -> FastAPI:
    app = FastAPI()

    @app.get("/fine")
    async def fine() -> str:
        return "yes"

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("a secret of ours")

    @app.get("/missing")
    async def missing() -> None:
        raise MissingExtra("xgrammar is not installed; install it.")

    @app.get("/midway")
    async def midway() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            raise ValueError("a secret of ours")

        return StreamingResponse(parts())

    app.add_middleware(Observed, metrics=counted, model="small")
    return app


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines about requests."""
    return [
        record.headstart_fields
        for record in caplog.records
        if record.name == "headstart.server.requests"
    ]


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headstart.server")


def test_an_answer_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    client = TestClient(observed(counted))
    assert client.get("/fine").json() == "yes"
    assert client.get("/nowhere").status_code == 404
    assert counted.answers == [("/fine", "GET", 200), (None, "GET", 404)]
    assert [line["status"] for line in logged(caplog)] == [200, 404]


def test_a_route_that_fails_is_a_500_in_the_shape_that_clients_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: it was counted and logged as if the client had gone; it got plain text."""
    counted = Counted()
    answer = TestClient(observed(counted)).get("/broken")
    error = answer.json()["error"]
    assert answer.status_code == 500 and answer.headers["content-type"] == "application/json"
    assert (error["type"], error["code"]) == ("server_error", "engine_error")
    assert "secret" not in answer.text and "log says more" in error["message"]
    assert counted.answers == [("/broken", "GET", 500)]
    (line,) = logged(caplog)
    assert line["status"] == 500 and line["error"] == error["message"]
    (told,) = [record for record in caplog.records if record.exc_info]
    assert "GET /broken failed" in told.getMessage() and "secret" in str(told.exc_info)


def test_errors_that_have_a_status_keep_it() -> None:
    counted = Counted()
    answer = TestClient(observed(counted)).get("/missing")
    assert answer.status_code == 501 and answer.json()["error"]["code"] == "missing_extra"
    assert counted.answers == [("/missing", "GET", 501)]


def test_a_stream_that_fails_midway_ends_with_the_status_it_began_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted()
    with pytest.raises(ValueError, match="secret"):  # whoever runs the app cuts the connection
        TestClient(observed(counted)).get("/midway")
    assert counted.answers == [("/midway", "GET", 200)]
    assert "log says more" in logged(caplog)[0]["error"]


async def never(scope: Any, receive: Any, send: Any) -> None:
    """An application whose client goes away before it answers."""


def test_a_client_that_went_away_is_a_499(caplog: pytest.LogCaptureFixture) -> None:
    counted, sent = Counted(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "client": None}
    metrics: Any = counted
    asyncio.run(Observed(never, metrics, "small")(scope, receive, send))
    assert counted.answers == [(None, "POST", 499)] and not sent
    assert logged(caplog)[0]["status"] == 499
