"""Tools of a request: checked, shown to the chat template, and forced where asked."""

from __future__ import annotations

from typing import Any

import pytest
from support.tool_texts import TEMPLATES, TIME, WEATHER, earlier, rendered

from headstart.errors import RequestError
from headstart.server.grammars.specs import json_object
from headstart.server.tools.calls import prepare
from headstart.server.tools.formats import TOOL_FORMATS
from headstart.server.tools.requests import read_tools

USER = {"role": "user", "content": "hi"}
HERMES = TOOL_FORMATS["hermes"]


def asked(**options: Any) -> Any:
    settings = {"tools": [WEATHER, TIME], "format": HERMES, "chat_template": TEMPLATES["hermes"]}
    return prepare([USER], **{**settings, **options})


def strict(tool: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True, **changes}}


def test_tools_are_shown_to_the_template_and_strict_is_not() -> None:
    options = asked(tools=[strict(WEATHER), TIME]).template_options
    text = rendered(TEMPLATES["hermes"], [USER], **options)
    assert "get_weather" in text and '"name": "time"' in text and "strict" not in text
    for off in (asked(tool_choice="none"), asked(tools=None), asked(tools=[])):
        assert (off.template_options, off.grammar, off.format) == ({}, None, None)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_earlier_calls_and_answers_go_through_the_template(name: str) -> None:
    """Some templates write arguments as they are, others take them apart."""
    answer = {"role": "tool", "tool_call_id": "call_0", "content": "rain"}
    history = [USER, earlier(("get_weather", {"city": "Rome", "days": 2})), answer]
    ready = prepare(history, format=TOOL_FORMATS[name]).messages
    text = rendered(TEMPLATES[name], ready, add_generation_prompt=True)
    assert "Rome" in text and "\\" not in text and text.endswith("<|tool|>rain<|assistant|>")
    assert history[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome", "days": 2}'


def test_what_forces_calls() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    free, required, one = asked(), asked(tool_choice="required"), asked(tool_choice=named)
    assert free.grammar is None and not free.is_forced
    assert "get_weather" in required.grammar.text and required.max_calls is None
    assert "get_weather" not in one.grammar.text and one.max_calls == 1
    guarded = asked(tools=[strict(WEATHER), TIME])
    assert guarded.grammar.format["type"] == "triggered_tags"
    either = asked(spec=json_object())
    assert either.grammar.format["type"] == "or"
    assert asked(spec=json_object(), tool_choice="none").grammar == json_object()


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_tool_may_have_the_name_of_a_mode(name: str) -> None:
    """Regression: naming such a tool set the mode, and forced nothing, or any tool."""
    own = {"type": "function", "function": {"name": name}}
    one = asked(tools=[WEATHER, own], tool_choice=own)
    assert name in one.grammar.text and "get_weather" not in one.grammar.text
    assert one.format is not None and one.is_forced and one.max_calls == 1
    assert asked(tools=[WEATHER, own], tool_choice="auto").grammar is None
    required = asked(tools=[WEATHER, own], tool_choice="required")
    assert "get_weather" in required.grammar.text and required.max_calls is None


def test_only_strict_tools_must_be_enforceable() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    loose = {**WEATHER, "function": {**WEATHER["function"], "parameters": odd}}
    assert "uniqueItems" not in asked(tools=[loose], tool_choice="required").grammar.text
    with pytest.raises(RequestError, match="'uniqueItems' at #/properties/a, which cannot be"):
        asked(tools=[strict(loose)])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tools": ["x"]}, r"tools\[0\] is not"),
        ({"tools": [{"type": "custom", "function": {"name": "x"}}]}, r"tools\[0\] is not"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters, digits"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "holds x, which"),
        ({"tools": [{**TIME, "cache": 1}]}, "holds cache, which"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "schema"),
        ({"tools": [strict(TIME, strict=1)]}, "neither true nor false"),
        ({"tools": [strict(TIME, description=1)]}, "description that is not text"),
        ({"tools": [TIME, TIME]}, "holds time more than once"),
        ({"tools": [TIME] * 129}, "holds 129 tools; give up to 128"),
        ({"tools": None, "tool_choice": "required"}, "required and no tools"),
        ({"tool_choice": "sometimes"}, "'sometimes'; give none, auto, required"),
        ({"tool_choice": 3}, "'3'; give none"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "names 'f', which is"),
        ({"tool_choice": {"type": "allowed_tools"}}, "give none, auto, required"),
        ({"format": None}, "--tool-call-parser"),
        ({"format": TOOL_FORMATS["llama3_json"], "tools": [strict(TIME)]}, "have no mark by which"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        asked(**options)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"role": "user", "tool_calls": []}, "not a list in an assistant message"),
        ({"role": "assistant", "tool_calls": 1}, "not a list in an assistant message"),
        ({"role": "assistant", "tool_calls": [{}]}, "a tool call that is not"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
         "'f' whose arguments are not a JSON object"),
    ],
)  # fmt: skip
def test_messages_with_broken_calls_are_refused(message: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        prepare([message], format=HERMES)


def test_a_tool_without_parameters_takes_none() -> None:
    assert read_tools([TIME])[0].schema() == {"type": "object", "properties": {}}


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ({}, True),
        ({"$defs": {"x": {"type": "string"}}}, True),
        ({"properties": {}}, True),
        ({"type": ["object"]}, True),
        ({"$ref": "#/$defs/x", "$defs": {"x": OBJECT}}, True),
        ({"anyOf": [OBJECT, {"$ref": "#/$defs/x"}], "$defs": {"x": OBJECT}}, True),
        ({"enum": [{"a": 1}]}, True),
        ({"type": "array", "items": {"type": "integer"}}, False),
        ({"type": "string"}, False),
        ({"type": ["object", "null"]}, False),
        ({"anyOf": [OBJECT, {"type": "null"}]}, False),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, False),
        ({"$ref": "#"}, False),
        ({"const": 3}, False),
    ],
)
def test_parameters_that_are_forced_are_an_object(parameters: Any, fits: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    if fits:
        assert asked(tools=[tool], tool_choice="required").grammar is not None
        return
    with pytest.raises(RequestError, match="parameters of the tool 'f' allow something else"):
        asked(tools=[tool], tool_choice="required")


CALLED = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]  # fmt: skip


def test_a_template_without_a_place_for_tools_gets_them_as_text() -> None:
    given = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %} system"
    for choice, is_forced in (("auto", False), ("required", True)):
        chat = prepare(
            CALLED, tools=[given], tool_choice=choice, format=TOOL_FORMATS["hermes"],
            chat_template=template,
        )  # fmt: skip
        system, user, call, result = chat.messages
        assert system["role"] == "system" and '"name": "f"' in system["content"]
        assert "<tool_call>" in system["content"] and user == CALLED[0]
        assert call["content"].startswith('<tool_call>\n{"name": "f", "arguments": {"a": 1}}')
        assert "tool_calls" not in call
        assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
        assert chat.template_options == {} and chat.is_forced is is_forced
        assert chat.format is not None and chat.new_parser() is not None
    silent = prepare(CALLED, format=TOOL_FORMATS["hermes"], chat_template=template)
    assert [own["role"] for own in silent.messages] == ["user", "assistant", "user"]
    quiet = prepare(
        [{"role": "user", "content": "x"}], tools=[given], format=TOOL_FORMATS["hermes"],
        chat_template=template.removesuffix(" system"),
    )  # fmt: skip
    assert [own["role"] for own in quiet.messages] == ["user"], "such a template may know no system"
