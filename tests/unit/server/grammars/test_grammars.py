"""Grammars: what may be asked for, what is refused, and what a compiled one allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.grammar_walks import END, SPECIAL, ids, walk
from support.tool_texts import TEMPLATES, TIME, WEATHER
from transformers import PreTrainedTokenizerFast

from headstart.calibrate.tokenizer import tokenizer_documents
from headstart.errors import RequestError
from headstart.server.answers.chat_text import assembled
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import (
    GrammarSpec,
    choice,
    ebnf,
    grammar_spec,
    json_object,
    json_schema,
    regex,
)
from headstart.server.reasoning import REASONING_FORMATS, after_reasoning
from headstart.server.tools.calls import prepare
from headstart.server.tools.formats import TOOL_FORMATS

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (json_object(), '{"a": [1, {"b": null}]}', "[1]"),
        (json_schema(SCHEMA), '{"name": "Bob", "age": 3}', '{"name": "Bobby"}'),
        (json_schema(json.dumps(SCHEMA)), '{"name": "Bob"}', '{"name": "Bob", "age": -3}'),
        (json_schema({"type": "array", "minItems": 1}), '[1, "x"]', "[]"),
        (regex("[a-c]{2,3}x?"), "abc", "abcd"),
        (ebnf('root ::= "a" root | "b"'), "aab", "ba"),
        (choice(["yes", "yesterday"]), "yesterday", "yester"),
        (after_reasoning(regex("x+"), REASONING_FORMATS["think"], "open"), "hm</think>\nx", "xx"),
        (after_reasoning(regex("x+"), REASONING_FORMATS["think"]), "<think>hm</think>x", "hm"),
        (after_reasoning(regex("x+"), REASONING_FORMATS["think"]), "xx", "</think>x"),
    ],
    ids=lambda value: value.what if isinstance(value, GrammarSpec) else None,
)
def test_a_grammar_allows_what_fits_and_nothing_else(
    spec: GrammarSpec, good: str, bad: str, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(spec)
    assert walk(compiler.compile(spec), good)
    assert not walk(grammar, bad)


TEXTS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "days": 1}}\n'
    "</tool_call>",
    "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</parameter>\n"
    "<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "x", "days": 1}}',
}


def forced(name: str, choice: Any) -> Any:
    return prepare(
        [], tools=[WEATHER, TIME], tool_choice=choice, format=TOOL_FORMATS[name],
        chat_template=TEMPLATES[name],
    )  # fmt: skip


def deepseek(name: str) -> str:
    format = TOOL_FORMATS[name]
    call = format.prefix.format(name="get_weather") + '{"city": "x", "days": 1}' + format.suffix
    return format.wrapper[0] + call + format.wrapper[1]


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_forced_call_is_what_the_parser_reads(name: str, compiler: GrammarCompiler) -> None:
    text = TEXTS.get(name) or deepseek(name)
    named = {"type": "function", "function": {"name": "get_weather"}}
    other = {"type": "function", "function": {"name": "time"}}
    for tool_choice in ("required", named):
        ready = forced(name, tool_choice)
        assert walk(compiler.compile(ready.grammar), text)
        assert not walk(compiler.compile(ready.grammar), "It rains."), "the control"
        parser = ready.new_parser()
        content, (call,) = assembled([*parser.feed(text), *parser.finish()])
        assert content is None and call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "x", "days": 1}
    assert not walk(compiler.compile(forced(name, other).grammar), text)


def test_strict_tools_are_held_to_their_schema_once_a_call_begins(
    compiler: GrammarCompiler,
) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    ready = prepare(
        [], tools=[strict], format=TOOL_FORMATS["hermes"], chat_template=TEMPLATES["hermes"]
    )
    assert ready.grammar is not None
    for text, fits in [("It rains.", True), (f"So: {TEXTS['hermes']}", True),
                       ("<tool_call>x", False)]:  # fmt: skip
        assert walk(compiler.compile(ready.grammar), text) is fits


def test_a_marker_that_is_a_special_token_can_be_used_and_others_cannot(
    compiler: GrammarCompiler,
) -> None:
    mask = compiler.compile(forced("hermes", "required").grammar).allowed()
    assert mask is not None and mask[SPECIAL.index("<tool_call>")] and mask[ids("<")[0]]
    mask = compiler.compile(regex("<.user.>")).allowed()
    assert mask is not None and mask.nonzero().flatten().tolist() == ids("<")


@pytest.mark.parametrize(
    ("response_format", "structured", "match"),
    [
        ({"type": "xml"}, None, "type 'xml'; give text, json_object or json_schema"),
        ({"type": "json_schema"}, None, "is not {\"name\""),
        ({"type": "json_object", "schema": {}}, None, "holds schema, which is not known"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}, None, "holds x"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, None, "is a int"),
        (None, {}, "holds nothing; give exactly one of json, regex"),
        (None, {"regex": "a", "json": {}}, "exactly one"),
        (None, {"regex": ""}, "regex is not a text"),
        (None, {"choice": []}, "choice is not a list"),
        (None, {"json": "{"}, "text that is not JSON"),
        ({"type": "json_object"}, {"regex": "a"}, "both given"),
    ],
)  # fmt: skip
def test_what_is_asked_for_badly_is_refused(
    response_format: Any, structured: Any, match: str
) -> None:
    with pytest.raises(RequestError, match=match):
        grammar_spec(response_format, structured)


def test_what_is_asked_for_is_brought_into_one_form() -> None:
    named = {"name": "n", "schema": SCHEMA, "strict": True}
    assert grammar_spec(None, None) is grammar_spec({"type": "text"}, None) is None
    assert grammar_spec({"type": "json_object"}, None) == json_object()
    asked = grammar_spec({"type": "json_schema", "json_schema": named}, None)
    assert asked == grammar_spec(None, {"json": SCHEMA}) == json_schema(SCHEMA)


UNENFORCEABLE: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"not": {"type": "string"}}, "'not' without type"),
    ({"minLength": 3}, "'minLength' without type"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "pattern beside maxLength"),
    ({"type": "string", "format": "phone"}, "format 'phone'"),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "anyOf beside type"),
    ({"allOf": [{"type": "integer"}, {"const": 1}]}, "allOf of several"),
    ({"$ref": "https://example.com/a"}, r"\$ref .* not of the form #/"),
    ({"type": "object", "required": ["z"]}, "required z that properties"),
    ({"type": "string", "enum": ["a", 1]}, "enum beside type"),
    ({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}, "'nullable'"),
]


@pytest.mark.parametrize(("schema", "match"), UNENFORCEABLE)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(
    schema: Any, match: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(RequestError, match=f"has {match}"):
        json_schema(schema)
    compiler.compile(json_schema(schema, relaxed=True))  # what is left of it compiles


def test_what_xgrammar_warns_of_is_refused(compiler: GrammarCompiler) -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"const": 1}]}
    with pytest.raises(RequestError, match=r"oneOf with branches .* const .* set strict to false"):
        compiler.compile(json_schema(overlapping))
    compiler.compile(json_schema({"oneOf": [{"type": "integer"}, {"const": "a"}]}))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (regex("(a"), "the regex cannot be used: Regex parsing error.*parenthesis"),
        (ebnf("root := 1"), "the grammar cannot be used"),
        (ebnf('other ::= "a"'), "root"),
        (regex("\ud800"), "the regex cannot be used"),
        (ebnf("root ::= root"), "no text fits the grammar"),
        (regex("\u4e00+"), "no text fits the regex"),
        (json_schema({"$ref": "#"}), "no text fits the JSON schema"),
        (json_schema({"$ref": "#/$defs/none"}), "the JSON schema cannot be used"),
        (regex("a" * 30_000), "has 300.. bytes; this server takes up to 20000"),
    ],
)
def test_a_grammar_that_does_not_compile_says_why(
    spec: GrammarSpec, match: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(RequestError, match=match):
        compiler.compile(spec)


def test_a_tokenizer_of_whole_words_is_refused_without_a_warning_of_the_library(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in tokenizer_documents({"vocab_size": 40}).items():
        (tmp_path / name).write_text(text)
    words = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert words.decode([3, 4]) == "t3 t4"  # a blank that no token has
    with pytest.raises(RequestError, match="no decoder"):
        GrammarCompiler(words, 40, end_ids=[1])
    assert capfd.readouterr() == ("", "")


def test_drafts_that_do_not_fit_are_refused_without_a_warning_of_the_library(
    compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: special tokens, and tokens behind the end, wrote lines into the JSON log."""
    grammar = compiler.compile(regex("a"))
    special = range(len(SPECIAL))
    assert not any(grammar.fork().accept(token) for token in special)
    for token in ids("a"):
        assert grammar.accept(token)
    assert [token for token in special if grammar.fork().accept(token)] == [END]
    assert grammar.accept(END) and not grammar.accept(ids("a")[0])
    assert capfd.readouterr() == ("", "")
