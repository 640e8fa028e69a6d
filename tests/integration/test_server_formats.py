"""Grammars, tools and reasoning through the API: whole and streamed, with and without drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.server_runs import ALPHABET, BLANKS, SPECIAL, Server

HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 120, "seed": 5}
FORMED = {"chat_template_kwargs": {"thinking": False}, "banned_token_ids": BLANKS}
CALLED = {"chat_template_kwargs": {"thinking": False}, "logit_bias": dict.fromkeys(BLANKS, -9)}
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "size": {"enum": ["small", "medium", "large"]}},
    "required": ["on", "size"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "set_lamp", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "set_lamp"}}
IN_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "lamp", "schema": SCHEMA}}
}
IN_TOOL = {"tools": [TOOL], "tool_choice": NAMED}
LETTER_B = len(SPECIAL) + ALPHABET.index("b")
CHARACTERS = "(\u00e9|\u20ac|\U0001f600){12}"


@pytest.fixture(scope="module")
def client(api_server: Server) -> Iterator[openai.OpenAI]:
    options: Any = {"api_key": "x", "max_retries": 0, "timeout": 60}
    with openai.OpenAI(base_url=f"{api_server.url}/v1", **options) as made:
        yield made


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[list[str], list[Any], str | None]:
    """Pieces of content, deltas of tool calls, and the finish reason."""
    contents, calls, reason = [], [], None
    fields = {"extra_body": FORMED, **fields}
    for chunk in client.chat.completions.create(**ASKED, **fields, stream=True):
        for choice in chunk.choices:
            contents += [choice.delta.content] if choice.delta.content else []
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
    return contents, calls, reason


def test_characters_of_several_tokens_are_never_split(client: openai.OpenAI) -> None:
    own = {**FORMED, "structured_outputs": {"regex": CHARACTERS}}
    contents, _, reason = streamed(client, extra_body=own)
    assert reason == "stop" and len(contents) > 3
    assert all(set(piece) <= set("\u00e9\u20ac\U0001f600") for piece in contents)
    assert re.fullmatch(CHARACTERS, "".join(contents))


def test_an_answer_keeps_to_its_schema(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED, **IN_SCHEMA, extra_body=FORMED).choices[0]
    found = json.loads(whole.message.content or "")
    assert set(found) == {"on", "size"} and whole.finish_reason == "stop"
    contents, _, _ = streamed(client, **IN_SCHEMA)
    assert "".join(contents) == whole.message.content


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_parses_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**ASKED, **fields, extra_body=CALLED).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "set_lamp"
    assert set(json.loads(call.function.arguments)) == {"on", "size"}
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    contents, deltas, reason = streamed(client, **fields, extra_body=CALLED)
    assert contents == [] and reason == "tool_calls"
    assert deltas[0].id and deltas[0].function.name == "set_lamp"
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments


def test_a_named_tool_is_called_also_where_its_name_is_none(client: openai.OpenAI) -> None:
    own: Any = {"type": "function", "function": {**TOOL["function"], "name": "none"}}
    named: Any = {"type": "function", "function": {"name": "none"}}
    fields: Any = {"tools": [own, TOOL], "tool_choice": named, "extra_body": CALLED}
    (call,) = client.chat.completions.create(**ASKED, **fields).choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "none"


@pytest.mark.parametrize("fields", [IN_SCHEMA, IN_TOOL], ids=["schema", "tool"])
def test_drafts_change_no_answer_that_is_held_to_a_form(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    said, accepted = [], []
    for speculate in ("off", 3):
        own = {"headstart": {"speculate": speculate, "statistics": True}, "top_k": 0, **CALLED}
        answer = client.chat.completions.create(
            **{**ASKED, "temperature": 1.5, "top_p": 1}, **fields, extra_body=own
        )
        message = answer.choices[0].message
        calls = [call.function.arguments for call in message.tool_calls or []]
        said.append((message.content, calls))
        statistics = answer.model_extra["headstart"]["statistics"]
        accepted.append(statistics["accepted_tokens"])
    assert said[0] == said[1]
    assert accepted[0] == 0 < accepted[1]


@pytest.mark.parametrize("skip", [None, True, False], ids=["default", "skip", "keep"])
def test_special_tokens_are_no_content_where_tools_are_given(
    client: openai.OpenAI, skip: bool | None
) -> None:
    special = [0, 2, 3, LETTER_B]
    own: dict[str, Any] = {"allowed_token_ids": special, "ignore_eos": True, **FORMED}
    own = own if skip is None else {**own, "skip_special_tokens": skip}
    asked = {**ASKED, "max_tokens": 30, "temperature": 50, "tools": [TOOL]}
    whole = client.chat.completions.create(**asked, extra_body=own).choices[0].message.content
    stream = client.chat.completions.create(**asked, extra_body=own, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert said == whole and "b" in said and ("<s>" in said) is (skip is False)


def test_the_usual_end_has_no_stop_reason_and_it_is_beside_the_finish(
    client: openai.OpenAI,
) -> None:
    for own, reason in [({"stop_token_ids": [LETTER_B]}, LETTER_B), ({}, None)]:
        end = LETTER_B if own else SPECIAL.index("</s>")
        stream = client.chat.completions.create(
            **ASKED, logit_bias={str(end): 100}, extra_body=own, stream=True
        )
        *_, last = stream
        assert last.choices[0].finish_reason == "stop"
        assert last.choices[0].model_extra == {"stop_reason": reason}


def test_thinking_that_the_template_opened_is_no_content(client: openai.OpenAI) -> None:
    own = {"chat_template_kwargs": {"thinking": True}}
    thought = client.chat.completions.create(**ASKED, extra_body=own)
    plain = client.chat.completions.create(**ASKED)
    message = thought.choices[0].message
    assert message.content == "" and message.model_extra["reasoning_content"]
    assert plain.choices[0].message.content and not plain.choices[0].message.model_extra
    counted: list[Any] = [answer.usage for answer in (thought, plain)]
    assert [usage.completion_tokens_details.reasoning_tokens for usage in counted] == [
        counted[0].completion_tokens, 0,
    ]  # fmt: skip


def test_a_form_that_is_complete_ends_the_answer_whatever_else_was_asked(
    client: openai.OpenAI,
) -> None:
    own = {"structured_outputs": {"regex": "ab"}, "min_tokens": 20, **FORMED}
    choice = client.chat.completions.create(**ASKED, extra_body=own).choices[0]
    assert choice.message.content == "ab" and choice.finish_reason == "stop"
    own = {"structured_outputs": {"regex": "ab"}, "banned_token_ids": [LETTER_B]}
    with pytest.raises(openai.BadRequestError, match="no token is left to choose"):
        client.chat.completions.create(
            **ASKED, extra_body={**own, "chat_template_kwargs": {"thinking": False}}
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"regex": "a" * 70000}}, "this server takes up to 65536"),
        ({"tools": [{"type": "search"}]}, "knows no other tools"),
        ({"tool_choice": "required"}, "no tools are given"),
    ],
    ids=["format", "regex", "large", "tool", "choice"],
)
def test_forms_that_cannot_be_kept_are_refused(
    client: openai.OpenAI, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        client.chat.completions.create(**ASKED, extra_body=fields)
