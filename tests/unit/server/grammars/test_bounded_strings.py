"""Strings of limited length: the same texts as xgrammar's own rules, with other rules."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import xgrammar

from headstart.server.grammars import process
from headstart.server.grammars.bounded_strings import (
    MOST_CHARACTERS,
    Room,
    quick_strings,
    with_quick_strings,
)
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import json_schema

ITEM = {"type": "string", "maxLength": 5}
SCHEMAS: dict[str, Any] = {
    "at most": ITEM,
    "at least and at most": {"type": "string", "minLength": 2, "maxLength": 4},
    "exactly": {"type": "string", "minLength": 3, "maxLength": 3},
    "in a list": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 3},
    "as a choice": {"anyOf": [ITEM, {"type": "null"}, {"type": "string", "maxLength": 2}]},
    "names and others": {
        "type": "object",
        "properties": {
            'n"é': ITEM, "s": {"enum": ["a\nb", 'c"']}, "p": {"type": "string", "pattern": "^a?b"},
        },
        "required": ['n"é', "s"],
    },
}  # fmt: skip


def structural_tag(schema: Any) -> str:
    return f'{{"type": "structural_tag", "format": {json_schema(schema).text}}}'


def tokens() -> list[bytes]:
    """An end token, single bytes, and tokens of up to seven, with quotes and half characters."""
    draw = random.Random(0)
    parts = [
        b'"',
        b'"',
        b",",
        b"}",
        b"]",
        b" ",
        b"a",
        b"b",
        b"ns",
        b"\xc3\xa9",
        b"\xc3",
        b"\xa9",
        b"1",
    ]
    made = {b"".join(draw.choices(parts, k=draw.randint(2, 4))) for _ in range(600)}
    singles = [bytes([byte]) for byte in (*range(9, 14), *range(32, 127), 0xC3, 0xA9)]
    return [b"", *singles, *sorted(made - set(singles))]


def info() -> Any:
    texts = tokens()
    kind = xgrammar.VocabType.RAW
    return xgrammar.TokenizerInfo(texts, kind, vocab_size=len(texts), stop_token_ids=[0])


def compiled(tag: str) -> Any:
    maker = xgrammar.GrammarCompiler(info(), max_threads=1, cache_enabled=False)
    return maker.compile_structural_tag(tag)


def fitting(matcher: Any, count: int) -> list[int]:
    """Tokens that may come next."""
    words = np.zeros((1, -(-count // 32)), np.int32)
    matcher.fill_next_token_bitmask(words)
    flags = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    return [int(token) for token in np.flatnonzero(flags)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_xgrammars_own_rules(name: str) -> None:
    tag, count, ended = structural_tag(SCHEMAS[name]), len(tokens()), 0
    other = process.rewritten(xgrammar, tag)
    assert '"type": "grammar"' in other
    plain, quick = (compiled(text) for text in (tag, other))
    for seed in range(12):
        draw = random.Random(seed)
        matchers = [xgrammar.GrammarMatcher(each) for each in (plain, quick)]
        for _ in range(80):
            first, second = (fitting(matcher, count) for matcher in matchers)
            assert first == second
            token = draw.choice(first)
            assert all(matcher.accept_token(token) for matcher in matchers)
            if token == 0:
                ended += 1
                break
    assert ended > 6


def test_compiled_grammars_have_the_other_rules(compiler: GrammarCompiler) -> None:
    spec = json_schema({"type": "string", "maxLength": 6})
    compiler.compile(spec)
    text = str(compiler._compiled[spec][0].grammar)
    assert "_left_6" in text and "{0, 6}" not in text


@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {"type": "string", "minLength": 3},
     {"type": "string", "maxLength": MOST_CHARACTERS + 1}, {"const": "maxLength"}],
)  # fmt: skip
def test_others_stay_as_they_are(schema: Any) -> None:
    tag = structural_tag(schema)
    assert json.loads(process.rewritten(xgrammar, tag)) == json.loads(tag)


def test_a_grammar_that_is_not_read_as_it_was_written_stays() -> None:
    format = json.loads(json_schema(ITEM).text)
    text = str(xgrammar.Grammar.from_json_schema(json.dumps(ITEM), max_whitespace_cnt=1))
    assert with_quick_strings(format, lambda *_: text, lambda _: False) == format
    assert with_quick_strings(format, lambda *_: text, lambda _: True) != format


def test_a_schema_that_xgrammar_refuses_is_refused_as_before() -> None:
    tag = '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": ' \
          '"nothing", "maxLength": 3}, "style": "json", "max_whitespace_cnt": 1}}'  # fmt: skip
    assert process.rewritten(xgrammar, tag) == tag


def test_schemas_inside_tags_are_rewritten_and_other_styles_are_not() -> None:
    format = json.loads(json_schema(ITEM).text)
    tag = {"type": "tag", "begin": "<a>", "content": format, "end": "</a>"}
    text = str(xgrammar.Grammar.from_json_schema(json.dumps(ITEM), max_whitespace_cnt=1))
    found = with_quick_strings({"type": "or", "elements": [tag]}, lambda *_: text, lambda _: True)
    assert found["elements"][0]["content"]["type"] == "grammar"
    other = {**format, "style": "qwen_xml"}
    assert with_quick_strings(other, lambda *_: text, lambda _: True) == other


def test_a_rule_whose_new_names_are_taken_stays() -> None:
    text = (
        'root ::= (("\\"" c{0, 2} "\\""))\nc ::= (([a-z]))\nroot_left_1 ::= (("x"))\n'
        'wide ::= (("\\"" root{0, 2} "\\""))\nlast ::= (("\\"" c{1, 1} "\\""))\n'
    )
    found = quick_strings(text, Room()).splitlines()
    assert found[:4] == text.splitlines()[:4], "names are taken, or it repeats more than characters"
    assert found[4:] == [
        'last ::= (("\\"" last_left_1))', "last_left_1 ::= ((c last_left_0))",
        'last_left_0 ::= (("\\""))',
    ]  # fmt: skip


def test_many_long_strings_have_room_for_some_of_them() -> None:
    """Masks of each grow with the square of its length: thirty would be refused as too large."""
    names = [f"f{i}" for i in range(30)]
    schema = {
        "type": "object", "required": names,
        "properties": {name: {"type": "string", "maxLength": MOST_CHARACTERS} for name in names},
    }  # fmt: skip
    text = process.rewritten(xgrammar, structural_tag(schema))
    grammar = json.loads(text)["format"]["grammar"]
    assert grammar.count(f"_left_{MOST_CHARACTERS} ::=") == 4
    assert grammar.count(f"{{0, {MOST_CHARACTERS}}}") == 26
