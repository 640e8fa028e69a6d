"""POST /v1/messages with Anthropic's own client: text, system, streams, tools, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.server_runs import Server

ASKED: dict[str, Any] = {
    "model": "default", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}],
}  # fmt: skip
TOOL = {
    "name": "add", "description": "adds",
    "input_schema": {
        "type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}},
        "required": ["a"], "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Imported where it is needed; missing where an environment is older than this."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic: Any, api_server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=api_server.url, api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(api_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_server.url, verify=False, timeout=60) as made:
        yield made


def test_text_is_that_of_the_chat(client: Any, http: httpx.Client) -> None:
    system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    own = {"extra_body": {"temperature": 0, "ignore_eos": True}}
    answer = client.messages.create(**ASKED, system=system, **own)
    chat = {
        "messages": [{"role": "system", "content": "be kind"}, *ASKED["messages"]],
        "max_tokens": 16, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    said = http.post("/v1/chat/completions", json=chat).json()
    assert answer.content[0].text == said["choices"][0]["message"]["content"] != ""
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 16
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert total == said["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(
        model="default", messages=ASKED["messages"], system=system
    )
    assert counted.input_tokens == total


def test_a_stream_builds_up_the_same_message(client: Any) -> None:
    own = {"extra_body": {"temperature": 1.0, "seed": 7}}
    whole = client.messages.create(**ASKED, **own)
    with client.messages.stream(**ASKED, **own) as stream:
        text = "".join(stream.text_stream)
        built = stream.get_final_message()
    assert text == built.content[0].text == whole.content[0].text
    assert (built.stop_reason, built.usage) == (whole.stop_reason, whole.usage)


def test_tools_are_called_and_their_results_read(client: Any) -> None:
    asked = {
        **ASKED, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 160,
        "extra_body": {"chat_template_kwargs": {"thinking": False}, "temperature": 0},
    }  # fmt: skip
    answer = client.messages.create(**asked)
    (call, *_) = answer.content
    assert call.type == "tool_use" and call.name == "add" and call.input["a"] in (1, 2)
    assert answer.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    further = client.messages.create(**{**ASKED, "messages": history}, tools=[TOOL])
    assert further.content[0].type == "text"


def test_a_stop_sequence_is_named(client: Any) -> None:
    text = client.messages.create(**ASKED, extra_body={"temperature": 0}).content[0].text
    stop = next(char for char in text if char != "\ufffd")
    answer = client.messages.create(**ASKED, extra_body={"temperature": 0}, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert stop not in "".join(block.text for block in answer.content)


def test_errors_have_anthropics_shape(anthropic: Any, client: Any, http: httpx.Client) -> None:
    with pytest.raises(anthropic.BadRequestError, match="'temprature' is not known"):
        client.messages.create(**ASKED, extra_body={"temprature": 1})
    with pytest.raises(anthropic.NotFoundError, match="no model is called"):
        client.messages.create(**{**ASKED, "model": "claude"})
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\] holds a block of type"):
        client.messages.create(**{**ASKED, "messages": image})
    document = http.post("/v1/messages", json={"messages": ASKED["messages"]}).json()
    assert document["type"] == "error" and document["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in document["error"]["message"]
