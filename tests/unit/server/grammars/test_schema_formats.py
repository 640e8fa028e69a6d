"""Texts of a format are JSON, whatever a model writes: a random walk through each grammar."""

from __future__ import annotations

import json
import random

import pytest
from support.grammar_walks import CHARS, END, SPECIAL, ids

from headstart.errors import RequestError
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.schema_rules import FORMATS
from headstart.server.grammars.specs import json_schema
from headstart.server.grammars.token_grammar import TokenGrammar

_WALKS, _LONG = 8, 40  # the number of texts, and when they should come to their end


def random_text(grammar: TokenGrammar, draw: random.Random) -> str:
    tokens: list[int] = []
    while True:
        mask = grammar.allowed()
        assert mask is not None
        allowed = mask.nonzero().flatten().tolist()
        ending = [token for token in (END, ids('"')[0]) if token in allowed and tokens]
        token = ending[0] if ending and len(tokens) > _LONG else draw.choice(allowed)
        assert grammar.accept(token) and len(tokens) < 2000
        if token == END:
            return "".join(CHARS[token - len(SPECIAL)] for token in tokens)
        tokens.append(token)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_gives_json(name: str, compiler: GrammarCompiler) -> None:
    spec = json_schema({"type": "string", "format": name})
    draw = random.Random(name)
    for _ in range(_WALKS):
        assert isinstance(json.loads(random_text(compiler.compile(spec), draw)), str)


@pytest.mark.parametrize("name", ["json-pointer", "relative-json-pointer"])
def test_formats_that_would_not_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"format '{name}'"):
        json_schema({"type": "string", "format": name})
