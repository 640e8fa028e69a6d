"""Grammars compiled by xgrammar: speculation changes nothing but the speed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import assert_head_is_alive, ids_of, run, seeded
from support.server_runs import VOCAB, served
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.output import Result
from headstart.server.answers.chat_text import assembled
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import GrammarSpec, choice, ebnf, json_schema, regex
from headstart.server.tools.calls import prepare
from headstart.server.tools.formats import TOOL_FORMATS

PROMPTS = ["Tell me about", "What is 7 times 6?"]
NAMES = ["first", "second"]
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
        for name in NAMES
    },
    "required": NAMES,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "boolean"}},
            "required": ["city", "days"],
        },
    },
}
CALL = prepare(
    [], tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
    format=TOOL_FORMATS["hermes"], chat_template="tools",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return served(tiny)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    return Engine(folder, speculate=0, dtype="float32", device="cpu", kv_bytes=1 << 24)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Engine:
    return Engine(folder, speculate=3, dtype="float32", device="cpu", kv_bytes=1 << 24)


@pytest.fixture(scope="module")
def compiler(plain: Engine) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(plain.prompts.tokenizer, VOCAB, end_ids=plain.prompts.end_ids)
    yield made
    made.close()


def answers(engine: Engine, grammar: Any, **settings: Any) -> list[Result]:
    params = seeded(max_tokens=400, ignore_eos=False, **settings)
    return run(engine, PROMPTS, params, grammar=grammar)


def is_json(text: str) -> bool:
    found = json.loads(text)
    return list(found) == NAMES and all(len(value) == 2 for value in found.values())


def is_call(text: str) -> bool:
    parser = CALL.new_parser()
    content, calls = assembled([*parser.feed(text), *parser.finish()])
    return content is None and set(json.loads(calls[0]["function"]["arguments"])) == {
        "city", "days",
    }  # fmt: skip


CASES: dict[str, tuple[GrammarSpec | None, Callable[[str], Any]]] = {
    "schema": (json_schema(SCHEMA), is_json),
    "regex": (regex("([a-z]{3} ){5}end"), re.compile("([a-z]{3} ){5}end").fullmatch),
    "ebnf": (ebnf('root ::= "(" inner ")"\ninner ::= [0-3]{4,8} | "(" inner ")"'), bool),
    "choice": (choice(["a long choice of words", "another choice"]), bool),
    "tool call": (CALL.grammar, is_call),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", list(CASES))
def test_the_text_does_not_depend_on_k(
    name: str, temperature: float, plain: Engine, drafting: Engine, compiler: GrammarCompiler
) -> None:
    spec, fits = CASES[name]
    assert spec is not None
    expected, found = (
        answers(engine, compiler.compile(spec), temperature=temperature)
        for engine in (plain, drafting)
    )
    assert ids_of(found) == ids_of(expected)
    outputs = [output for result in found for output in result.outputs]
    for output in outputs:
        assert output.finish_reason == "stop" and fits(output.text), output.text
    assert "accepted" in {origin for output in outputs for origin in output.origins}


def test_an_answer_ends_where_its_grammar_ends(drafting: Engine, compiler: GrammarCompiler) -> None:
    end = drafting.prompts.tokenizer.eos_token_id
    for ignores in (False, True):
        params = seeded(max_tokens=50, ignore_eos=ignores)
        output = run(drafting, PROMPTS[:1], params, grammar=compiler.compile(regex("abcdef")))[0]
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abcdef", "stop")
        assert output.outputs[0].token_ids[-1] == end


def test_drafts_are_masked_too_and_so_accepted_more_often(
    drafting: Engine, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = CASES["tool call"][0]
    assert spec is not None
    masked = answers(drafting, compiler.compile(spec))
    monkeypatch.setattr("headstart.engine.drafter._row", _without_mask())
    blind = answers(drafting, compiler.compile(spec))
    assert ids_of(masked) == ids_of(blind), "what is drafted never changes the text"
    assert_head_is_alive(masked)
    assert _accepted(masked) > 2 * _accepted(blind)


def _without_mask() -> Any:
    from dataclasses import replace

    from headstart.engine.drafter import _row

    return lambda request: replace(_row(request), mask=None)


def _accepted(results: list[Result]) -> int:
    return sum(output.origins.count("accepted") for r in results for output in r.outputs)


def test_a_mask_is_forgotten_when_the_answer_takes_another_way() -> None:
    class Letters:
        """No letter twice in a row: the one that is not allowed tells which came last."""

        def __init__(self, last: int = 0):
            self.last = last

        def allowed(self) -> Any:
            import torch

            return torch.arange(9) != self.last

        def accept(self, token: int) -> bool:
            fits = token < 9 and token != self.last
            self.last = token
            return fits

        def fork(self) -> Letters:
            return Letters(self.last)

    def last_letters(drafts: list[int]) -> list[int]:
        return [int((~mask).nonzero()) for mask in guarded.masks(drafts) if mask is not None]

    guarded = GuardedGrammar(Letters(), 9)
    assert last_letters([4, 6]) == [0, 4, 6]
    guarded.accept(4)
    assert last_letters([6, 2]) == [4, 6, 2]
    guarded.accept(3)
    assert last_letters([]) == [3]
    assert len(guarded.masks([1, 9, 1])) == 2, "rows behind a draft that does not fit are dead"
    assert len(guarded.masks([1, 2])) == 3, "and it leaves no trace"
