"""Errors name the field that is at fault, and say all that is allowed there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.tool_texts import TEMPLATES

from headstart.engine.options import MAX_DRAFTS
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams
from headstart.server.completions import CompletionRequest
from headstart.server.grammars.specs import grammar_spec, regex
from headstart.server.intake import parse
from headstart.server.protocol.requests import ChatRequest
from headstart.server.refusals import Refusal, about, refusal_of, renamed
from headstart.server.tools.calls import prepare
from headstart.server.tools.formats import TOOL_FORMATS

ASKED = {"messages": [{"role": "user", "content": "x"}]}
DRAFTS = f"should be less than or equal to {MAX_DRAFTS}, or 'auto' or 'off'"


def refusal(fields: dict[str, Any]) -> Refusal:
    kind = CompletionRequest if "prompt" in fields else ChatRequest
    whole = fields if "prompt" in fields else {**ASKED, **fields}
    with pytest.raises(Refusal) as refused:
        parse(json.dumps(whole).encode(), kind)
    return refused.value


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": 5}, "prompt", "should be a valid string, or a valid list"),
        ({"prompt": {"str": 1}}, "prompt", "should be a valid string, or a valid list"),
        ({"prompt": {"list[str]": [1]}}, "prompt", "should be a valid string, or a valid list"),
        ({"prompt": [-1]}, "prompt[0]", "should be greater than or equal to 0"),
        ({"prompt": ["a", 1]}, "prompt[1]", "should be a valid string"),
        ({"prompt": [1, "a"]}, "prompt[1]", "should be a valid integer"),
        ({"prompt": [[1], [2, None]]}, "prompt[1][1]", "should be a valid integer"),
        ({"stop": [1]}, "stop[0]", "should be a valid string"),
        ({"tool_choice": 5}, "tool_choice", "should be a valid string, or an object"),
        ({"headstart": 7}, "headstart", "should be an object"),
        ({"headstart": {"speculate": 99}}, "headstart.speculate", DRAFTS),
        (
            {"headstart": {"speculate": "fast"}},
            "headstart.speculate",
            "should be a valid integer, or 'auto' or 'off'",
        ),
        ({"messages": [1]}, "messages[0]", "should be an object"),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            "messages[0].content[0]",
            "should be an object",
        ),
        ({"messages": [{}]}, "messages[0].role", "is missing"),
        ({"logit_bias": {"logit_bias": "x"}}, "logit_bias.logit_bias", "should be a valid number"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_the_deepest_place_is_named_with_all_that_is_allowed_there(
    fields: dict[str, Any], param: str, said: str
) -> None:
    found = refusal(fields)
    assert found.param == param and found.message == f"the field {param!r} {said}."


def test_an_unknown_field_comes_before_a_bad_value() -> None:
    assert refusal({"stop": [1], "nonsense": 2}).param == "nonsense"
    assert refusal({"stop": [1]}).param == "stop[0]"  # the control


def schema(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": text}}


def tool(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "t", "parameters": parameters, **more}}


def tools(*given: Any, **options: Any) -> Callable[[], object]:
    settings = {"format": TOOL_FORMATS["hermes"], "chat_template": TEMPLATES["hermes"], **options}
    return lambda: prepare(ASKED["messages"], tools=given, **settings)


LIST = {"type": "array"}
FAULTS: list[tuple[Callable[[], object], str | None]] = [
    (lambda: grammar_spec(schema({"type": "object", "required": 5}), None),
     "response_format.json_schema"),
    (lambda: grammar_spec({"type": "xml"}, None), "response_format"),
    (lambda: grammar_spec(None, {"choice": []}), "structured_outputs.choice"),
    (lambda: grammar_spec(None, {"json": {}, "regex": "a"}), "structured_outputs"),
    (lambda: regex(""), None),  # the control: nobody said where it stands
    (tools({}), "tools[0]"),
    (tools(tool({}), tool({})), "tools"),
    (tools(tool(LIST), tool_choice="required"), "tools[0].function.parameters"),
    (tools(tool({}), tool_choice="never"), "tool_choice"),
    (tools(tool({}), format=None), "tools"),
    (lambda: prepare([{}, {"role": "user", "tool_calls": []}]), "messages[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("work", "field"), FAULTS, ids=[str(field) for _, field in FAULTS])
def test_whoever_raises_an_error_names_its_field(
    work: Callable[[], object], field: str | None
) -> None:
    with pytest.raises(RequestError) as raised:
        work()
    assert refusal_of(raised.value).param == field


def test_a_grammar_is_the_same_wherever_it_was_asked_for() -> None:
    one, other = grammar_spec(None, {"regex": "a"}), regex("a")
    assert one is not None and one.field == "structured_outputs.regex" and other.field is None
    assert one == other and hash(one) == hash(other)


def test_fields_of_the_engine_are_named_as_the_request_does() -> None:
    chat = parse(json.dumps({**ASKED, "max_completion_tokens": -1}).encode(), ChatRequest)
    text = parse(b'{"prompt": "x", "max_tokens": -1}', CompletionRequest)
    for request, name in ((chat, "max_completion_tokens"), (text, "max_tokens")):
        with pytest.raises(Exception, match="max_tokens is -1") as raised:
            SamplingParams(max_tokens=-1)
        assert refusal_of(renamed(raised.value, request.own_names)).param == name
    assert chat.own_names["prompt"] == "messages" and "prompt" not in text.own_names


def test_the_first_name_stays() -> None:
    with pytest.raises(RequestError) as raised, about("tools"), about("tools[0]"):
        raise RequestError("it has no name.")
    assert raised.value.field == "tools[0]"
