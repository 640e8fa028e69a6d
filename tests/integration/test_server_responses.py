"""POST /v1/responses with OpenAI's own client: text, streams, tools, structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from support.server_runs import BLANKS, Server

ASKED: dict[str, Any] = {"model": "default", "input": "hello", "max_output_tokens": 16}
GREEDY: dict[str, Any] = {**ASKED, "temperature": 0}
# No thinking, and no blanks, which a model of no sense likes wherever a grammar allows any.
PLAIN: dict[str, Any] = {
    "banned_token_ids": BLANKS, "chat_template_kwargs": {"thinking": False},
}  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function", "name": "add", "description": "adds", "strict": True,
    "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}},
        "required": ["a"], "additionalProperties": False,
    },
}  # fmt: skip


class Answer(BaseModel):
    ok: bool
    word: str = Field(pattern="^[a-z]{2,4}$")


@pytest.fixture(scope="module")
def client(api_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(api_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_server.url, verify=False, timeout=60) as made:
        yield made


def test_text_is_that_of_the_chat(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        **{**GREEDY, "instructions": "be kind"}, extra_body={"ignore_eos": True}
    )
    messages: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="default", messages=messages, max_tokens=16, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.output_text and answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 16 and answer.id.startswith("resp_")


def test_a_stream_builds_up_the_same_answer(client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": Answer.model_json_schema()}}
    asked = {**ASKED, "temperature": 1.2, "text": form, "max_output_tokens": 80}
    asked["extra_body"] = {**PLAIN, "seed": 7}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        built = stream.get_final_response()
    assert built.output_text == whole.output_text and built.status == whole.status
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1
    )
    raw = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    text = "".join(e.delta for e in raw if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_tools_are_called_and_their_results_read(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        **GREEDY, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 160,
        "extra_body": {"chat_template_kwargs": {"thinking": False}},
    }  # fmt: skip
    answer = client.responses.create(**asked)
    (call, *_) = answer.output
    assert call.type == "function_call" and call.name == "add"
    assert json.loads(call.arguments)["a"] in (1, 2) and answer.status == "completed"
    streamed = list(client.responses.create(**asked, stream=True))
    pieces = "".join(
        e.delta for e in streamed if e.type == "response.function_call_arguments.delta"
    )
    assert pieces.startswith(call.arguments)
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    further = client.responses.create(**{**GREEDY, "input": history, "tools": [TOOL]})
    assert further.status in ("completed", "incomplete") and further.output_text


def test_answers_keep_to_a_schema(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="default", input="hello", text_format=Answer, max_output_tokens=80,
        temperature=0, extra_body=PLAIN,
    )  # fmt: skip
    assert isinstance(parsed.output_parsed, Answer)


def test_log_probabilities_come_where_they_are_included(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        **GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    }  # fmt: skip
    (item,) = client.responses.create(**asked).output
    assert item.type == "message" and item.content[0].type == "output_text"
    entries = item.content[0].logprobs
    assert entries and all(len(entry.top_logprobs) == 2 for entry in entries)
    streamed = [
        entry.token
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in entries][: len(streamed)] and streamed


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
        ({"conversation": "c"}, "conversation", "keeps no conversations"),
        ({"background": True}, "background", "stream instead"),
        ({"truncation": "auto"}, "truncation", "shorten it"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "has the type 'web_search'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0]",
            "a part of type 'input_image'",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, "input", "should be 'system'"),
        ({"include": ["file_search_call.results"]}, "include", "this server knows"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "may have 4096"),
        ({"nonsense": 1}, "nonsense", "is not known"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "has the type 'xml'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "Say in instructions how long"),
        ({"prompt": {"id": "kept"}}, "prompt", "input to /v1/responses"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_stateless_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = http.post("/v1/responses", json={**ASKED, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"] and error["param"] == param, error


def test_neutral_values_pass(http: httpx.Client) -> None:
    neutral = {
        "background": False, "truncation": "disabled", "store": True, "metadata": {},
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "previous_response_id": None,
    }  # fmt: skip
    answer = http.post("/v1/responses", json={**ASKED, **neutral})
    assert answer.status_code == 200, answer.text
