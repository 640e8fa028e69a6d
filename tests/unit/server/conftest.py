"""One process that compiles grammars, for all files: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.grammar_walks import END, MAX_SECONDS, VOCAB, tokenizer

from headstart.server.grammars.compiler import GrammarCompiler


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(
        tokenizer(), VOCAB, end_ids=[END], markers=["<tool_call>"], max_bytes=20_000,
        max_seconds=MAX_SECONDS, cache_bytes=1 << 25,
    )  # fmt: skip
    yield made
    made.close()
