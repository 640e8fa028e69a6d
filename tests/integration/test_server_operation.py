"""A server in trouble: clients that go away, queues that are full, engines that fail, the end."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest
from support.long_runs import one_of_each
from support.server_runs import HTTP, VOCAB
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

from headstart.calibrate.tokenizer import tokenizer_documents
from headstart.cli.serve import run
from headstart.data.api_keys import API_KEY_VARIABLE
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError, MissingExtra, RequestError
from headstart.learn.options import LearnOptions
from headstart.server import rehearsal
from headstart.server.answering import Answering
from headstart.server.lifecycle import Serving
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions, listen
from headstart.server.reasoning import Start
from headstart.server.refusals import Refusal


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_ends_its_request(
    engine: Engine, server: Running, stream: bool
) -> None:
    before = engine.stats.aborted
    url = f"{server.url}/v1/completions"
    if stream:
        with HTTP.stream("POST", url, json={**LONG, "stream": True}) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(url, json=LONG, timeout=0.3)
    assert wait_until(lambda: engine.stats.aborted > before) < 1
    assert wait_until(lambda: is_idle(engine)) < 1
    assert server.serving.state.gate.num_open == 0


def test_a_full_queue_is_a_429_that_says_when_to_come_back(engine: Engine) -> None:
    places = engine.options.num_requests + 2
    with serving(engine, max_queue=2, max_n=places) as server:
        with HTTP.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "n": places, "stream": True}
        ) as response:
            lines = response.iter_lines()  # held: httpx ends a stream whose reader is forgotten
            next(lines)
            refused = ask(server, SHORT)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
            with pytest.raises(openai.RateLimitError, match="no more may wait"):
                client.completions.create(model="default", **{"prompt": "a"})
            client.close()
        wait_until(lambda: server.serving.state.gate.num_open == 0)
        assert ask(server, SHORT).status_code == 200


def test_more_answers_than_there_can_be_places_are_no_matter_of_waiting(engine: Engine) -> None:
    places = engine.options.num_requests + 2
    with serving(engine, max_queue=2, max_n=places + 1) as server:
        refused = ask(server, {**SHORT, "n": places + 1})
        assert refused.status_code == 400 and f"has {places} places" in refused.text
        gate = server.serving.state.gate
        before = gate._mean_seconds
        HTTP.post(f"{server.url}/tokenize", json={"prompt": "a"})
        assert gate._mean_seconds == before  # only answers tell how long one takes
        ask(server, SHORT)
        wait_until(lambda: gate._mean_seconds != before)


def test_a_request_has_a_time_limit(engine: Engine) -> None:
    """What was written until then is the answer, as if that were its max_tokens."""
    with serving(engine, request_timeout_seconds=0.3) as server:
        late = ask(server, {**LONG, "n": 2})
        assert late.status_code == 200
        for choice in late.json()["choices"]:
            assert choice["text"] and choice["finish_reason"] == "length"
            assert choice["stop_reason"] == "request_timeout"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        stream = client.completions.create(
            model="default", prompt="abc", max_tokens=3000, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        *chunks, last = stream
        assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) > 1
        assert last.usage is not None and 0 < last.usage.completion_tokens < 3000
        client.close()
        assert wait_until(lambda: is_idle(engine)) < 1
        wait_until(lambda: server.serving.state.tally.aborted == 2)  # counted after the last byte
        engine.scheduler.check()


def test_a_request_without_a_token_in_time_is_not_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a 408, which clients try again by themselves: one call ran three times."""
    asked = []
    with serving(engine, request_timeout_seconds=0.2) as server:
        submit = server.serving.state.worker.submit
        monkeypatch.setattr(
            server.serving.state.worker, "submit", lambda own: (asked.append(own), submit(own))
        )
        monkeypatch.setattr(engine.scheduler, "plan", lambda elsewhere=(): [])  # nothing runs
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=2)
        with pytest.raises(openai.BadRequestError, match=r"no token was written within 0\.2 s"):
            client.completions.create(model="default", prompt="abc")
        with pytest.raises(openai.APIError, match="no token was written"):
            list(client.completions.create(model="default", prompt="abc", stream=True))
        client.close()
        assert len(asked) == 2 and server.serving.state.tally.aborted == 2
        assert wait_until(lambda: is_idle(engine)) < 1


def raw(server: Running, data: bytes) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nX: "], ids=["nothing", "part"])
def test_who_does_not_finish_his_headers_is_disconnected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr("headstart.server.wire.HEADER_SECONDS", 0.2)
    with serving(engine) as server, raw(server, data) as connection:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        assert ask(server, {**LONG, "max_tokens": 200}).status_code == 200  # a slow answer is not


def test_a_flood_of_headers_is_refused(server: Running) -> None:
    with raw(server, b"GET /health HTTP/1.1\r\n") as connection:
        with contextlib.suppress(ConnectionError):
            for number in range(2000):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"x" * 100))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert server.status() == "ready"


def test_a_client_that_reads_nothing_is_given_up_in_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.server.answering._LAST_SECONDS", 0.2)
    body = json.dumps({**LONG, "n": 8, "stream": True, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with serving(engine, request_timeout_seconds=0.4) as server, raw(server, head + body):
        wait_until(lambda: engine.has_work)
        wait_until(lambda: server.serving.state.gate.num_open == 0)
        assert wait_until(lambda: is_idle(engine)) < 1


def test_the_first_signal_lets_answers_finish_and_refuses_new_ones(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headstart.server")
    with serving(engine, drain_seconds=20) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(ask, server, {**LONG, "max_tokens": 100})
        wait_until(lambda: engine.has_work)
        server.serving.signal(signal.SIGTERM)
        wait_until(lambda: server.status() == "draining")
        refused = ask(server, SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert running.result().json()["usage"]["completion_tokens"] == 100
        assert server.join() == 0
    said = "stopped (SIGTERM, all answers were complete): 1 requests finished, 0 aborted"
    assert last_line(caplog) == said


@pytest.mark.parametrize(
    ("signals", "code", "why"),
    [
        (1, 1, "SIGTERM, and not all answers were complete after 0.5 s"),
        (2, 143, "a second SIGTERM"),
    ],
    ids=["limit", "second signal"],
)
def test_what_is_not_finished_in_time_is_cut_off(
    engine: Engine, server: Running, caplog: pytest.LogCaptureFixture, signals: int, code: int,
    why: str,
) -> None:  # fmt: skip
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask, server, {**LONG, "stream": True})
        wait_until(lambda: engine.has_work)
        for _ in range(signals):
            server.serving.signal(signal.SIGTERM)
        assert '"code":"stopped"' in running.result().text
    assert server.join() == code
    assert is_idle(engine)
    assert last_line(caplog) == f"stopped ({why}): 0 requests finished, 1 aborted"


def test_while_a_model_is_loaded_everything_is_a_503(engine: Engine) -> None:
    is_loaded = threading.Event()

    def load() -> Engine:
        is_loaded.wait()
        return engine

    with serving(load) as server:
        assert server.status() == "starting"
        assert ask(server, SHORT).json()["error"]["code"] == "loading"
        is_loaded.set()
        wait_until(lambda: server.status() == "ready")
        assert ask(server, SHORT).status_code == 200


@pytest.mark.parametrize("kind", [ConfigError, RuntimeError], ids=["misuse", "anything"])
def test_a_model_that_cannot_be_loaded_is_the_callers_error(kind: type[Exception]) -> None:
    def load() -> Engine:
        raise kind("dtype is 'float7'")

    options = ServerOptions(port=0)
    with pytest.raises(kind, match="float7"):
        Serving("small", options, load, listen(options)).run()


@pytest.mark.usefixtures("logging_as_before")
def test_a_port_that_is_taken_is_said_before_anything_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "headstart.server.lifecycle", None)  # an import would fail
    with listen(ServerOptions(port=0)) as taken:
        options = ServerOptions(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{options.port} "):
            run(model=str(folder), server=options, options=EngineOptions(), learn=LearnOptions())
    assert capsys.readouterr().err == ""
    with pytest.raises(MissingExtra):  # a free one: then it is imported
        free = ServerOptions(port=0)
        run(model=str(folder), server=free, options=EngineOptions(), learn=LearnOptions())
    assert f"loading {folder}; http://127.0.0.1:" in capsys.readouterr().err


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.records[-1].getMessage()


def test_a_model_without_grammars_says_so_in_one_line(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokens are whole words, of which no grammar knows the blanks between."""
    caplog.set_level("INFO", "headstart.server")
    words = shutil.copytree(folder, tmp_path / "words")
    for name, text in tokenizer_documents({"vocab_size": VOCAB}).items():
        (words / name).write_text(text)
    with serving(small_engine(words), is_eager=True) as server:
        wait_until(lambda: "with a grammar are refused: grammars need" in caplog.text)
        refused = ask(server, {**SHORT, "structured_outputs": {"regex": "a+"}})
        assert refused.status_code == 400 and "no decoder" in refused.text
        assert refused.json()["error"]["param"] == "structured_outputs.regex"
        assert ask(server, SHORT).status_code == 200


def test_requests_of_the_servers_own_are_not_counted(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "headstart.server")
    engine, answered, answer = small_engine(folder), [], Answering._answer

    async def watched(own: Answering, *given: Any) -> bool:
        with pytest.raises(Refusal, match="is being loaded"):
            server.serving.state.gate.check()  # clients wait meanwhile
        is_cut = await answer(own, *given)
        answered.append((own.answer_id, engine.stats.output_tokens > 0))
        return is_cut

    monkeypatch.setattr(Answering, "_answer", watched)
    with serving(lambda: engine, is_eager=True) as server:
        wait_until(lambda: server.status() == "ready")
        assert set(answered) == {("cmpl-rehearsal", True), ("chatcmpl-rehearsal", True)}
        assert engine.stats.output_tokens == engine.stats.prompt_tokens == 0
        lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
        counted = [line for line in lines if "success_total{" in line or "step_duration" in line]
        numbers = [line.split()[-1] for line in counted if not line.startswith("#")]
        assert len(numbers) > 5 and set(numbers) == {"0.0"}
    assert "rehearsal" not in caplog.text
    assert "0 requests finished" in caplog.text


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    one_of_each(
        2,
        [
            (Panic("lost"), "a request of the server's own failed: lost"),
            (RequestError("not this"), "a chat of the server's own was refused: not this"),
        ],
    ),
)
def test_a_server_is_ready_whatever_becomes_of_its_own_requests(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    error: BaseException, said: str,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "headstart.server")

    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(rehearsal, "prepare_chat", fail)
    with serving(lambda: small_engine(folder), is_eager=True) as server:
        wait_until(lambda: server.status() == "ready")
        assert ask(server, SHORT).status_code == 200
    assert said in caplog.text


def test_keys_are_asked_for_where_there_are_some(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "two, three")
    with serving(engine, api_key=["one"]) as server:
        for key, status in [("one", 200), ("three", 200), ("four", 401)]:
            headers = {"Authorization": f"Bearer {key}"}
            assert ask(server, SHORT, headers=headers).status_code == status
        assert ask(server, SHORT).status_code == 401
        assert server.status() == "ready"  # probes have no key
        for method, path, with_key in [
            ("FOO", "/v1/completions", 405), ("GET", "/tokenize", 405), ("GET", "/v1/files", 404),
        ]:  # fmt: skip
            assert HTTP.request(method, f"{server.url}{path}").status_code == 401
            headers = {"Authorization": "Bearer one"}
            answer = HTTP.request(method, f"{server.url}{path}", headers=headers)
            assert answer.status_code == with_key
        assert HTTP.post(f"{server.url}/health").status_code == 405
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="four", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        client.close()


@pytest.mark.parametrize("origins", [None, ["http://page"]], ids=["off", "on"])
def test_web_pages_of_other_origins_may_ask_only_where_that_was_allowed(
    engine: Engine, origins: list[str] | None
) -> None:
    with serving(engine, cors_origin=origins) as server:
        answer = HTTP.get(f"{server.url}/version", headers={"Origin": "http://page"})
        assert answer.headers.get("access-control-allow-origin") == (origins or [None])[0]


def test_important_requests_are_answered_first(folder: Path) -> None:
    own = small_engine(folder, max_running_requests=1)
    order: list[str] = []

    def one(name: str, priority: int, tokens: int) -> None:
        ask(server, {**SHORT, "max_tokens": tokens, "priority": priority})
        order.append(name)

    with serving(own, allow_priority=True) as server, ThreadPoolExecutor() as pool:
        pool.submit(one, "running", 0, 150)
        wait_until(lambda: len(own.scheduler.running) == 1)
        pool.submit(one, "later", 5, 40)
        wait_until(lambda: len(own.scheduler.waiting) == 1)
        pool.submit(one, "sooner", -5, 40)
    assert order.index("sooner") < order.index("later")


@pytest.mark.parametrize(
    ("text", "start", "thought"),
    [
        ("ab</think>Yes", "open", 10),
        ("abc", "open", 3),
        ("<think>ab</think>Yes", "free", 17),
        ("Yes</think>", "free", 0),
        ("ab</think>Yes", "closed", 0),
    ],
)
def test_thinking_is_counted_up_to_the_end_of_its_mark(
    engine: Engine, text: str, start: Start, thought: int
) -> None:
    model = ServedModel(engine, ["small"], "small", ServerOptions())
    ids = engine.prompts.tokenizer.encode(text)  # a byte each, the marks too
    assert model.num_reasoning_tokens(ids, start) == thought
