"""What clients of other servers send by habit is taken, or refused with what to send instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.server_runs import Server

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def http(api_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_server.url, verify=False, timeout=60) as made:
        yield made


def text_of(http: httpx.Client, **fields: Any) -> str:
    answer = http.post("/v1/chat/completions", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_an_answer_of_another_server_can_be_sent_back(http: httpx.Client) -> None:
    said = {
        "role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None,
        "provider_specific_fields": {"refusal": None}, "reasoning": "hm", "function_call": None,
        "images": [],
    }  # fmt: skip
    history = [*HELLO, said, {"role": "user", "content": "go on"}]
    plain = [*HELLO, {"role": "assistant", "content": "yes"}, history[-1]]
    assert text_of(http, messages=history) == text_of(http, messages=plain)


def test_values_that_ask_for_what_happens_anyway_change_nothing(http: httpx.Client) -> None:
    neutral = {
        "modalities": ["text"], "best_of": 1, "use_beam_search": False, "echo": False,
        "length_penalty": 1.0, "verbosity": "medium", "user": "me", "top_logprobs": 0,
        "documents": [],
    }  # fmt: skip
    assert text_of(http, **neutral) == text_of(http)


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"grammar": 'root ::= "yes" | "no"'},
        {"guided_grammar": 'root ::= "yes" | "no"'},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_other_servers_names_for_grammars_are_taken(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    closed = {"chat_template_kwargs": {"thinking": False}}
    assert text_of(http, **asked, **closed) in ("yes", "no")


def test_schemas_under_other_names_are_taken(http: httpx.Client) -> None:
    closed = {"chat_template_kwargs": {"thinking": False}, "max_tokens": 30}
    for name in ("guided_json", "json_schema"):
        assert text_of(http, **{name: {"enum": [12, 13]}}, **closed) in ("12", "13")


def test_a_request_may_bring_its_own_id(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**ASKED, "request_id": "mine-1"})
    assert answer.json()["id"] == "chatcmpl-mine-1"


def test_special_tokens_may_be_left_out_of_a_completion(http: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "add_special_tokens": False}
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/embeddings", "For embeddings ask another one."),
        ("/chat/completions", "/v1/chat/completions is; the base URL"),
        ("/v1/v1/messages", "leave it out of the base URL"),
        ("/api/chat", "For Ollama's API ask another one."),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/v1/responses/resp_1", "keeps no answers"),
        ("/elsewhere", "Not Found. GET /docs lists what there is."),
    ],
)
def test_a_wrong_path_says_what_this_server_is(http: httpx.Client, path: str, said: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_probes_may_ask_for_the_head_of_an_answer_alone(http: httpx.Client, path: str) -> None:
    answer = http.head(path)
    assert answer.status_code == 200 and answer.content == b""


def test_reasoning_effort_goes_to_the_template(http: httpx.Client) -> None:
    """The template of these tests does not read it; a wrong kind of value is still an error."""
    assert text_of(http, reasoning_effort="low") == text_of(http)
    answer = http.post("/v1/chat/completions", json={**ASKED, "reasoning_effort": 3})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"
