"""The server's log: every record is one parsable line, and says what happened to a request."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings

import pytest
from support.engine_runs import PROMPT, assert_head_is_alive, greedy, run, soft, start
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.output import Completion, Result
from headstart.engine.stats import RequestStats
from headstart.server.answers.writer import usage_of
from headstart.server.lifecycle import startup_lines
from headstart.server.recording import LogFormat, RequestRecord, configure, log_request

pytestmark = pytest.mark.usefixtures("logging_as_before")
NASTY = 'gpt\n2026-01-01 ERROR forged "line"\r\x1b[31m\u2028end'


def configured(log_format: LogFormat) -> io.StringIO:
    stream = io.StringIO()
    configure(log_format, stream=stream)
    return stream


def record(**fields: object) -> RequestRecord:
    given = {
        "id": "chatcmpl-1", "route": "/v1/chat/completions", "status": 200, "model": "tiny",
        "client": "127.0.0.1:4711", "seconds": 0.5, "first_token_seconds": 0.1, **fields,
    }  # fmt: skip
    return RequestRecord(**given)


def test_a_request_is_one_json_line_with_all_its_numbers(drafting: Engine) -> None:
    (result,) = run(drafting, [PROMPT], greedy(24))
    assert_head_is_alive([result])
    stream = configured("json")
    log_request(record(results=[result], is_stream=True))
    line = json.loads(stream.getvalue())
    acceptance = result.stats.acceptance
    assert line["message"] == "request" and line["level"] == "info"
    assert line["id"] == "chatcmpl-1" and line["client"] == "127.0.0.1:4711" and line["stream"]
    assert line["prompt_tokens"] == len(result.prompt_token_ids)
    assert line["output_tokens"] == 24 and line["finish_reason"] == "length"
    assert line["acceptance_rate"] == pytest.approx(
        sum(acceptance.accepted) / sum(acceptance.drafted), abs=1e-4
    )
    assert line["acceptance_length"] == pytest.approx(acceptance.length, abs=1e-3)
    assert 2 < line["drafts_per_round"] <= 3
    assert line["tokens_per_second"] == pytest.approx(23 / 0.4, abs=0.01)
    before = max(0.0, 0.1 - result.stats.first_token_seconds)  # it was not the engine's yet
    assert line["queue_seconds"] == pytest.approx(before + result.stats.queue_seconds, abs=1e-6)
    assert "prompt" not in line and "error" not in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_no_more_tokens_are_cached_than_the_prompt_has() -> None:
    """Regression: a preempted request finds its own prompt in the cache, which was added up."""
    stats = RequestStats(num_cached_tokens=64, num_preemptions=1)
    output = Completion(0, [1], "", "stop", None, ["bonus"], None, stats)
    result = Result("a", [1] * 40, [output])
    fields = record(results=[result, result]).as_fields()
    assert (fields["prompt_tokens"], fields["cached_tokens"]) == (80, 80)
    assert usage_of([result])["prompt_tokens_details"] == {"cached_tokens": 40}


def test_prompts_are_logged_only_when_given() -> None:
    stream = configured("json")
    log_request(record(prompt="What is a head?"))
    assert json.loads(stream.getvalue())["prompt"] == "What is a head?"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_clients_send_cannot_break_a_line(log_format: LogFormat) -> None:
    stream = configured(log_format)
    log_request(record(model=NASTY, status=404, error=f"no model is called {NASTY!r}"))
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()
    if log_format == "json":
        assert json.loads(stream.getvalue())["model"] == NASTY


def test_text_lines_are_words() -> None:
    stream = configured("text")
    log_request(record(status=503, error="too many wait", first_token_seconds=None))
    line = stream.getvalue()
    assert " WARNING headstart.server.requests  request id=chatcmpl-1 " in line
    assert "status=503" in line and 'error="too many wait"' in line
    assert "first_token_seconds" not in line


@pytest.mark.parametrize(
    ("status", "error", "level"),
    [(200, None, "info"), (200, "the engine failed", "warning"), (400, "top_p is 2", "info"),
     (404, "no such model", "info"), (429, "too many", "info"), (500, "failed", "warning"),
     (503, None, "warning")],
)  # fmt: skip
def test_only_what_went_wrong_on_our_side_is_a_warning(
    status: int, error: str | None, level: str
) -> None:
    """Regression: every refusal of a client's mistake was one."""
    stream = configured("json")
    log_request(record(status=status, error=error))
    assert json.loads(stream.getvalue())["level"] == level


def test_uvicorn_and_warnings_take_the_same_form() -> None:
    logging.getLogger("uvicorn").handlers = [logging.StreamHandler(io.StringIO())]
    stream = configured("json")
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 7)
    logging.getLogger("uvicorn.access").info("GET / 200")  # our own line says more
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", stacklevel=1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", "py.warnings"]
    assert lines[0]["message"] == "Started server process [7]"


def test_an_exception_stays_within_its_json_line() -> None:
    stream = configured("json")
    try:
        raise ValueError("broken\nstep")
    except ValueError:
        logging.getLogger("headstart.server").exception("a step failed")
    line = json.loads(stream.getvalue())
    assert line["level"] == "error" and "ValueError: broken" in line["exception"]


def test_configuring_twice_does_not_write_twice() -> None:
    configured("json")
    stream = configured("text")
    logging.getLogger("headstart.server").info("once")
    assert stream.getvalue().count("once") == 1


def test_the_start_says_model_head_memory_and_costs(tiny: Tiny, plain: Engine) -> None:
    auto = start(soft(tiny), speculate="auto", max_running_requests=4)
    text = "\n".join(startup_lines(auto, "my-model"))
    assert "serves my-model: mimo, torch.float64 on cpu" in text
    assert "head: complete" in text and "K/V blocks of 4 tokens" in text
    assert re.search(r" 1 running: K=0 [\d.]+ ms, K=1 [\d.]+ ms", text)
    assert " 4 running:" in text and "16 running:" not in text
    whole = f"up to {auto.model.max_len} tokens"
    assert f"{whole} (" not in text and auto.admission.longest == auto.model.max_len
    small = start(soft(tiny), speculate=0, slots=64)
    (first, *_) = startup_lines(small, "my-model")
    assert first.endswith("prompt and answer up to 63 tokens (as much as K/V memory holds)")
    without = "\n".join(startup_lines(plain, "my-model"))
    assert "head: not loaded" in without and "drafts: none" in without
