"""Grammars: what may be asked for, what is refused, and what a compiled one allows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tool_texts import TEMPLATES, TIME, WEATHER
from transformers import PreTrainedTokenizerFast

from headstart.errors import RequestError
from headstart.server.grammar_specs import (
    GrammarSpec,
    choice,
    ebnf,
    grammar_spec,
    json_object,
    json_schema,
    regex,
    schema_format,
)
from headstart.server.grammars import GrammarCompiler, TokenGrammar
from headstart.server.reasoning import REASONING_FORMATS, after_reasoning
from headstart.server.tool_calls import prepare
from headstart.server.tool_formats import TOOL_FORMATS
from headstart.server.tool_parsing import assembled

CHARS = [chr(i) for i in range(32, 127)] + ["\n", *sorted({*"\uff5c\u2581"})]
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<tool_call>"]
VOCAB = 128  # more than the tokenizer has
END = SPECIAL.index("<eos>")
NEVER = frozenset((0, 2, *range(len(SPECIAL) + len(CHARS), VOCAB)))
MAX_SECONDS = 1.0


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate([*SPECIAL, *CHARS])}
    own = Tokenizer(models.BPE(vocab=words, merges=[]))
    own.decoder = decoders.Fuse()
    own.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(
        tokenizer(), VOCAB, end_ids=[END], markers=["<tool_call>"], max_bytes=20_000,
        max_seconds=MAX_SECONDS, cache_bytes=1 << 25,
    )  # fmt: skip
    yield made
    made.close()


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + CHARS.index(char) for char in text]


def walk(grammar: TokenGrammar, text: str) -> bool:
    """Whether the text fits and may end; every mask on the way agrees with what is accepted."""
    for token in [*ids(text), END]:
        mask = grammar.allowed()
        assert mask is None or (mask.shape, mask.dtype) == ((VOCAB,), torch.bool)
        is_allowed = mask is None or bool(mask[token])
        assert mask is None or not mask[list(NEVER)].any(), "tokens that are no text"
        assert grammar.fork().accept(token) is is_allowed
        if not grammar.accept(token):
            return False
    assert not grammar.allowed().any(), "nothing follows the end"  # type: ignore[union-attr]
    return True


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
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not without type"),
    ({"minLength": 3}, "minLength without type"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "pattern beside maxLength"),
    ({"type": "string", "format": "phone"}, "format 'phone'"),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "anyOf beside type"),
    ({"allOf": [{"type": "integer"}, {"const": 1}]}, "allOf of several"),
    ({"$ref": "https://example.com/a"}, r"\$ref .* not of the form #/"),
    ({"type": "object", "required": ["z"]}, "required z that properties"),
    ({"type": "string", "enum": ["a", 1]}, "enum beside type"),
    ({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}, "nullable"),
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
    with pytest.raises(RequestError, match="cannot be enforced: oneOf with overlapping"):
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


def test_a_grammar_that_needs_much_memory_is_given_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler._process, "_max_memory", 4 << 20)
    with pytest.raises(RequestError, match="needs more than 4 MiB to compile"):
        compiler.compile(json_schema({"enum": [f"{i:05}" for i in range(2000)]}))
    compiler.compile(json_schema({"enum": ["a few", "words"]}))


def nested(depth: int) -> Any:
    schema: Any = True
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_bomb_is_given_up_in_time_and_keeps_nobody_waiting(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="more than 48 levels deep"):
        json_schema(nested(60))
    bomb = GrammarSpec.of("JSON schema", schema_format(nested(450)))
    ends: list[str] = []

    def explode() -> None:
        with pytest.raises(RequestError, match="takes more than 1 s to compile"):
            compiler.compile(bomb)
        ends.append("bomb")

    started = time.monotonic()
    thread = threading.Thread(target=explode)
    thread.start()
    compiler.compile(regex("quick[a-d]"))
    ends.append("quick")
    thread.join(20)
    assert ends == ["quick", "bomb"]
    assert MAX_SECONDS <= time.monotonic() - started < 4 * MAX_SECONDS + 10


def test_a_grammar_that_is_slow_to_follow_ends_itself(compiler: GrammarCompiler) -> None:
    """Ambiguous repetitions compile at once and then take longer with every token."""
    grammar = compiler.compile(regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"))
    token = ids("a")[0]
    ahead = grammar.fork()
    with pytest.raises(RequestError, match="takes too long to follow"):
        for _ in range(100):
            ahead.accept(token)
    for again in (grammar.allowed, lambda: grammar.accept(token)):
        with pytest.raises(RequestError, match="takes too long to follow"):
            again()


def test_the_process_is_started_again_when_it_is_gone(compiler: GrammarCompiler) -> None:
    process = compiler._process._process
    process.kill()
    process.wait()
    assert walk(compiler.compile(regex("again")), "again")


def test_compiled_grammars_are_kept_within_a_bound(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [regex(f"kept[xyz]{{1,{number}}}") for number in range(10, 15)]
    compiler.compile(specs[0])
    kept, size = compiler._compiled[specs[0]]
    compiler.compile(specs[0])
    assert compiler._compiled[specs[0]][0] is kept
    monkeypatch.setattr(compiler, "_cache_bytes", 3 * size)
    for spec in specs:
        compiler.compile(spec)
    assert size <= compiler.num_cached_bytes <= 3 * size
    assert specs[-1] in compiler._compiled and specs[0] not in compiler._compiled
    with pytest.raises(RequestError, match="MiB when it is compiled; this server takes up to 0"):
        compiler.compile(regex("[a-z]{1,900}"))
