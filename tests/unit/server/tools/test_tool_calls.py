"""Tool calls: read as each format's models write them, whatever the pieces they come in."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_texts import TEMPLATES, TIME, WEATHER, earlier, rendered

from headstart.errors import ConfigError
from headstart.server.answers.chat_text import ChatText, assembled, delta
from headstart.server.tools.calls import PreparedChat, prepare
from headstart.server.tools.formats import TOOL_FORMATS, tool_format
from headstart.server.tools.parsing import ToolParser
from headstart.server.tools.requests import read_tools

FORMATS = list(TOOL_FORMATS)
CALLS = [
    ("get_weather", {"city": "Köln \"am\" Rhein", "days": 3, "more": ["a", "b {"]}),
    ("time", {}),
]  # fmt: skip


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """The calls as the template writes them, which is how the model was taught to."""
    format = TOOL_FORMATS[name]
    messages = prepare([earlier(*calls)], format=format).messages
    text = rendered(TEMPLATES[name], messages)
    return text.removeprefix("<|assistant|>")


def prepared(name: str, **options: Any) -> PreparedChat:
    return prepare(
        [{"role": "user", "content": "hi"}], tools=[WEATHER, TIME], format=TOOL_FORMATS[name],
        chat_template=TEMPLATES[name], **options,
    )  # fmt: skip


def parsed(parser: ToolParser, pieces: list[str]) -> tuple[str | None, list[tuple[str, Any]]]:
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, calls = assembled(events)
    functions = [call["function"] for call in calls]
    return content, [(f["name"], json.loads(f["arguments"])) for f in functions]


def cut(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[a:b] for a, b in pairwise(at)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("before", ["", "Let me see.\n\n"])
def test_what_a_template_writes_is_read_again(name: str, before: str) -> None:
    text = before + written(name, *CALLS)
    if name == "llama3_json" and before:  # calls are the whole answer there, or none of it
        assert parsed(prepared(name).new_parser(), [text]) == (text, [])
        return
    for pieces in ([text], list(text)):
        parser = prepared(name).new_parser()
        assert parsed(parser, pieces) == (before.strip() or None, CALLS)
        assert parser.num_calls == 2


@pytest.mark.parametrize("name", FORMATS)
def test_an_end_marker_inside_of_a_value_ends_nothing(name: str) -> None:
    format = TOOL_FORMATS[name]
    call = ("time", {"zone": f"{format.end} {format.begin}"})
    for forced in (False, True):
        parser = ToolParser(format, is_forced=forced)
        assert parsed(parser, list(written(name, call, CALLS[0]))) == (None, [call, CALLS[0]])


@pytest.mark.parametrize("name", [name for name in FORMATS if TOOL_FORMATS[name].head])
def test_forced_arguments_are_given_out_as_they_come(name: str) -> None:
    parser = ToolParser(TOOL_FORMATS[name], is_forced=True)
    text = written(name, CALLS[0])
    given = [delta(event) for piece in text for event in parser.feed(piece)] + parser.finish()
    first, *others = [part["tool_calls"][0] for part in given]
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert (first["index"], first["type"], first["id"][:5]) == (0, "function", "call_")
    assert len(others) > 20, "a whole call at once is no stream"
    assert all(set(part) == {"index", "function"} for part in others)
    arguments = "".join(part["function"]["arguments"] for part in others)
    assert json.loads(arguments) == CALLS[0][1]
    held = ToolParser(TOOL_FORMATS[name])
    assert sum(len(held.feed(piece)) for piece in text) == 2, "the control: name and arguments"


@pytest.mark.parametrize("name", [name for name in FORMATS if TOOL_FORMATS[name].head])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_the_name_of_a_forced_call_is_given_out_when_it_is_certain(name: str, choice: Any) -> None:
    """Of two tools when the texts of their calls part, of one with the marker of a call."""
    opening = prepared(name, tool_choice="required").openings["time"]
    text = TOOL_FORMATS[name].wrapper[0] + opening + '{"zone": "UTC"}' + TOOL_FORMATS[name].suffix
    parser, given = prepared(name, tool_choice=choice).new_parser(), []
    for at, piece in enumerate(text, 1):
        given += [(at, event) for event in parser.feed(piece)]
    begun = len(TOOL_FORMATS[name].wrapper[0])
    certain = opening.index("time") + 1 if choice == "required" else len(TOOL_FORMATS[name].begin)
    assert given[0][0] == begun + certain
    assert assembled(event for _, event in given)[1][0]["function"] == {
        "name": "time", "arguments": '{"zone": "UTC"}',
    }  # fmt: skip
    assert given[1][0] == begun + len(opening) + 1, "arguments come with their brace"
    free = prepared(name, tool_choice="auto").new_parser()
    assert [event for piece in text[: begun + len(opening)] for event in free.feed(piece)] == []


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_ends_with_calls_only_where_they_are_whole(name: str) -> None:
    """A stop string may cut a call of which the name, or some arguments, were given out."""
    text = written(name, CALLS[0])
    for size in range(len(text) + 1):
        answer = ChatText(prepared(name, tool_choice="required"), None, "free", {})
        calls = answer.message([], text[:size]).get("tool_calls", [])
        is_whole = bool(calls) and _is_object(calls[0]["function"]["arguments"])
        assert answer.finish_reason("stop") == ("tool_calls" if is_whole else "stop")
        assert answer.finish_reason("length") == "length"
    assert is_whole


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", FORMATS)
def test_of_a_required_call_that_is_cut_nothing_is_content(name: str) -> None:
    """Regression: max_tokens left a piece of the marker as the answer's content."""
    text = written(name, CALLS[0])
    for size in range(1, len(text)):
        parser = prepared(name, tool_choice="required").new_parser()
        content, _ = assembled([*parser.feed(text[:size]), *parser.finish()])
        assert not content


PIECES = {
    name: ["<", "{", "}", '"', "\n", " ", "text", "\\", *TOOL_FORMATS[name].markers,
           written(name, CALLS[0]), written(name, CALLS[1]), written(name, CALLS[0])[:-3],
           '{"name": "x", "parameters": {}}', "<function=f>", "</function>", "<arg_key>k"]
    for name in FORMATS
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=30), forced=st.booleans())
def test_the_reading_does_not_depend_on_how_the_text_was_cut(
    name: str, data: st.DataObject, cuts: list[int], forced: bool
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=6)))
    schemas = {tool.name: tool.parameters for tool in read_tools([WEATHER])}
    found = []
    for pieces in ([text], cut(text, cuts), list(text)):
        parser = ToolParser(TOOL_FORMATS[name], schemas, is_forced=forced)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        content, calls = assembled(events)
        found.append((content, [call["function"] for call in calls]))
    assert found[0] == found[1] == found[2]
    plain = ToolParser(None)
    assert assembled([*plain.feed(text), *plain.finish()])[0] == text


MALFORMED = {
    "hermes": ["{}", '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": [1]}', "{oops",
               '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {}} x'],
    "qwen_xml": ["f", "<function=f>", "<function=f><parameter=a>1</function>"],
    "glm": ["", "f <arg_key>a</arg_key>", "f\n<arg_value>1</arg_value>", "two words"],
    "deepseek_v3": ["f{}", "function\n{}"],
    "deepseek_v31": ["{}", "f{}"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "body"), [(name, body) for name, bodies in MALFORMED.items() for body in bodies]
)
def test_what_only_looks_like_a_call_stays_content(name: str, body: str) -> None:
    format = TOOL_FORMATS[name]
    text = f"Hm \n{format.begin}{body}{format.end} and on"
    assert parsed(ToolParser(format), list(text)) == (text, [])
    whole = written(name, CALLS[0]).removeprefix(format.wrapper[0]).lstrip()
    unfinished = f"Hm {whole[: whole.index(format.end) + 4]}"
    assert parsed(ToolParser(format), list(unfinished)) == (unfinished, [])


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"name": "f"}', '{"name": "f", "par', "[1]"])
def test_json_that_is_no_call_stays_content(text: str) -> None:
    assert parsed(ToolParser(TOOL_FORMATS["llama3_json"]), list(text)) == (text, [])


def test_small_liberties_are_taken_as_meant() -> None:
    for body in (
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"name": "f", "parameters": {"a":1}}',
    ):
        text = f"<tool_call>{body}</tool_call>"
        assert parsed(ToolParser(TOOL_FORMATS["hermes"]), [text]) == (None, [("f", {"a": 1})])
    broken = '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>'
    assert parsed(ToolParser(TOOL_FORMATS["hermes"]), [broken])[1] == [("f", {"a": "1\n2"})]


@pytest.mark.parametrize("name", ["qwen_xml", "glm"])
def test_the_schema_says_which_arguments_are_text(name: str) -> None:
    properties = {
        "text": {"type": "string"}, "number": {"type": "number"}, "either": {"$ref": "#/$defs/e"},
        "choice": {"enum": ["1", "2"]},
    }  # fmt: skip
    schema = {
        "properties": properties,
        "$defs": {"e": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
    }
    given = {"text": "007", "number": "1.5", "either": "true", "choice": "1", "free": "[1]"}
    parser = ToolParser(TOOL_FORMATS[name], {"f": schema})
    (call,) = parsed(parser, [written(name, ("f", given))])[1]
    assert call[1] == {"text": "007", "number": 1.5, "either": "true", "choice": "1", "free": [1]}


def test_one_call_at_most_where_asked() -> None:
    text = written("hermes", *CALLS)
    assert len(parsed(prepared("hermes", parallel_tool_calls=False).new_parser(), [text])[1]) == 1
    assert len(parsed(prepared("hermes").new_parser(), [text])[1]) == 2


def test_the_format_comes_from_the_template_or_the_user() -> None:
    for name, template in TEMPLATES.items():
        assert tool_format(None, template) is TOOL_FORMATS[name]
    assert tool_format("auto", "no marks") is None
    assert tool_format("none", TEMPLATES["hermes"]) is None
    assert tool_format("glm", TEMPLATES["hermes"]) is TOOL_FORMATS["glm"]
    with pytest.raises(ConfigError, match="'json'; expected auto, none, deepseek_v3"):
        tool_format("json", None)
