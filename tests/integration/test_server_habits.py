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
        "length_penalty": 1.0, "verbosity": "medium", "user": "me",
    }  # fmt: skip
    assert text_of(http, **neutral) == text_of(http)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/embeddings", "For embeddings ask another one."),
        ("/chat/completions", "/v1/chat/completions is; the base URL"),
        ("/v1/v1/messages", "leave it out of the base URL"),
        ("/api/chat", "For Ollama's API ask another one."),
        ("/elsewhere", "Not Found."),
    ],
)
def test_a_wrong_path_says_what_this_server_is(http: httpx.Client, path: str, said: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404 and said in answer.json()["error"]["message"]


def test_reasoning_effort_goes_to_the_template(http: httpx.Client) -> None:
    """The template of these tests does not read it; a wrong kind of value is still an error."""
    assert text_of(http, reasoning_effort="low") == text_of(http)
    answer = http.post("/v1/chat/completions", json={**ASKED, "reasoning_effort": 3})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"
