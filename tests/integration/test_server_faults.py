"""Engines that fail, for once or for good: clients are told at once, and the server never hangs."""

from __future__ import annotations

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS
from support.server_runs import HTTP, running
from support.server_threads import (
    LONG,
    SHORT,
    Running,
    ask,
    is_idle,
    serving,
    small_engine,
    wait_until,
)

from headstart.engine.engine import Engine
from headstart.errors import EngineError, RequestError
from headstart.server.model import ServedModel

RUNNING = re.compile(r"^headstart:num_requests_running\{.*\} 8\.0$", re.M)
ENDED = re.compile(r"^vllm:request_success_total\{.*\} (.*)$", re.M)


def num_ended(server: Running) -> float:
    """Samples that the metrics count as ended, for whatever reason."""
    return sum(map(float, ENDED.findall(HTTP.get(f"{server.url}/metrics").text)))


class Failing:
    """Lets the steps of an engine fail while `is_on`."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.is_on, self._step = False, engine.step
        monkeypatch.setattr(engine, "step", self.step)

    def step(self) -> Any:
        if self.is_on:
            raise RuntimeError("the device is on fire")
        return self._step()


def ask_many(server: Running, failing: Failing, count: int = 8) -> list[float]:
    """Start long requests, let the engine fail, return how long each took to end with an error."""
    ended: list[float] = []

    def one(number: int) -> None:
        answer = ask(server, {**LONG, "stream": number % 2 == 0})
        ended.append(time.monotonic())
        assert '"code":"engine_error"' in answer.text
        assert "on fire" not in answer.text  # what went wrong inside is for the log

    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(one, number) for number in range(count)]
        wait_until(lambda: server.serving.state.gate.num_open == count)
        time.sleep(0.2)
        failing.is_on, failed = True, time.monotonic()
        for future in waiting:
            future.result(timeout=10)
    return [at - failed for at in ended]


def test_a_failed_step_fails_all_requests_at_once_and_the_engine_goes_on(
    engine: Engine,
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing(engine, monkeypatch)
    correct = ask(server, {**SHORT, "seed": 1}).json()["choices"]
    assert max(ask_many(server, failing)) < 2
    failing.is_on = False
    # Not one for each client: a hundred of them would take seconds.
    assert [record.msg[:6] for record in caplog.records if record.exc_info] == ["a step"]
    assert is_idle(engine)
    assert server.status() == "ready"
    assert ask(server, {**SHORT, "seed": 1}).json()["choices"] == correct


@pytest.mark.parametrize("kind", [RequestError, RuntimeError], ids=["refusal", "failure"])
def test_a_request_that_the_engine_does_not_take_leaves_nothing_behind(
    engine: Engine, server: Running, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    submit, taken = engine.submit, list[Any]()

    def second_fails(asked: Any, **options: Any) -> str:
        taken.append(asked)
        if len(taken) == 2:
            raise kind("no")
        return submit(asked, **options)

    before = num_ended(server)
    monkeypatch.setattr(engine, "submit", second_fails)
    answer = ask(server, {**LONG, "prompt": ["a", "b"], "n": 2})
    assert answer.status_code == (400 if kind is RequestError else 500)
    wait_until(lambda: is_idle(engine))
    after = num_ended(server)
    assert after - before == 4, "two samples of two prompts"
    assert server.status() == "ready" and ask(server, SHORT).status_code == 200


def test_a_clients_own_id_is_not_the_engines(
    engine: Engine, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients may choose the same one, and neither must end the other's request."""
    submit, ids = engine.submit, list[str]()

    def noted(asked: Any, *, request_id: str, **options: Any) -> str:
        ids.append(request_id)
        return submit(asked, request_id=request_id, **options)

    monkeypatch.setattr(engine, "submit", noted)
    for _ in range(2):
        assert ask(server, {**SHORT, "request_id": "mine"}).json()["id"].endswith("-mine")
    assert len(set(ids)) == 2 and not any("mine" in own for own in ids)


def test_a_route_that_fails_tells_its_client_and_counts_as_a_failure(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cards(model: ServedModel) -> None:
        raise RuntimeError("no cards")

    monkeypatch.setattr(ServedModel, "cards", cards)
    answer = HTTP.get(f"{server.url}/v1/models")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "cards" not in answer.text
    scraped = HTTP.get(f"{server.url}/metrics").text
    codes = re.findall(r'http_responses_total\{(?=.*"/v1/models").*code="(\d+)"', scraped)
    assert codes == ["500"] and server.status() == "ready"


def test_an_engine_that_keeps_failing_ends_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = small_engine(folder)
    with serving(own) as server:
        failing = Failing(own, monkeypatch)
        failing.is_on = True
        for _ in range(4):
            assert ask(server, SHORT).status_code == 500
        assert server.join() == 1


def test_an_engine_whose_books_are_wrong_ends_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = small_engine(folder)
    with serving(own) as server:
        failing = Failing(own, monkeypatch)

        def recover() -> None:
            raise EngineError("1 K/V blocks belong to no request")

        monkeypatch.setattr(own, "recover", recover)
        assert max(ask_many(server, failing)) < 2
        assert server.join() == 1


def test_a_step_that_never_ends_ends_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, is_over, codes = small_engine(folder), threading.Event(), list[int]()
    monkeypatch.setattr(own, "step", is_over.wait)

    def end(code: int) -> None:  # in place of os._exit, which would end the tests
        codes.append(code)
        is_over.set()
        server.serving.signal(signal.SIGTERM)

    monkeypatch.setattr("headstart.server.lifecycle.os._exit", end)
    monkeypatch.setattr("headstart.server.lifecycle._WATCH_SECONDS", 0.1)
    monkeypatch.setattr("headstart.server.lifecycle._ERROR_SECONDS", 0.3)
    with serving(own, step_timeout_seconds=0.2) as server:
        answer = ask(server, SHORT)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopped"
        wait_until(lambda: bool(codes))
    assert codes[0] == 1


def test_a_process_whose_engine_dies_tells_everybody_and_ends(
    folder: Path, quick_python: str
) -> None:
    """The same in a process of its own, which must end by itself and with 1."""
    script = (str(SCRIPTS / "failing_headstart.py"),)
    with (
        running(folder, python=quick_python, script=script) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        url = f"{server.url}/v1/completions"
        waiting = [
            pool.submit(HTTP.post, url, json={**LONG, "stream": number % 2 == 0})
            for number in range(8)
        ]
        wait_until(lambda: bool(RUNNING.search(HTTP.get(f"{server.url}/metrics").text)))
        server.process.send_signal(signal.SIGUSR1)
        failed = time.monotonic()
        assert all('"code":"engine_error"' in answer.result().text for answer in waiting)
        assert time.monotonic() - failed < 2
        for _ in range(3):
            assert HTTP.post(url, json=SHORT).status_code == 500
        assert server.process.wait(15) == 1
