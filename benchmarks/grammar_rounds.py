"""What the host does for the grammars of a round: masks of all rows, and accepting of tokens.

python benchmarks/grammar_rounds.py TOKENIZER [--vocab 151936] [--requests 32] [--drafts 3]

TOKENIZER is a folder with a tokenizer.json; --vocab is the model's number of tokens, which may be
larger. Requests follow texts that fit their grammars, each from another place. All drafts of two
rounds of three are right, the last one of the third is not. Times are of `RoundGrammars`: of all
masks of a round, and of accepting the tokens that it emits. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
from over_http.load import SCHEMA
from transformers import PreTrainedTokenizerFast

from headstart.engine.grammar import GuardedGrammar
from headstart.engine.mask_batch import MaskRows
from headstart.engine.round_grammars import RoundGrammars
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import GrammarSpec, json_schema, regex
from headstart.server.tools.calls import prepare
from headstart.server.tools.formats import TOOL_FORMATS

ITEM = {"name": "a green lamp", "count": 12, "is_new": True}
ANSWER = {"title": "What is on the shelf", "state": "open", "items": [ITEM] * 4}
TEXT = "The first letter came on a Monday; nobody in the house knew who had sent it.\n" * 3
TOOLS = prepare(
    [], tools=[{"type": "function", "function": {"name": "store", "parameters": SCHEMA}}],
    tool_choice="required", parallel_tool_calls=False, format=TOOL_FORMATS["hermes"],
    chat_template="tools",
)  # fmt: skip


def cases() -> dict[str, tuple[GrammarSpec, str]]:
    assert TOOLS.grammar is not None
    call = {"name": "store", "arguments": ANSWER}
    return {
        "regex (.|\\n)*": (regex(r"(.|\n)*"), TEXT),
        "JSON schema": (json_schema(SCHEMA), json.dumps(ANSWER)),
        "tools": (TOOLS.grammar, f"<tool_call>\n{json.dumps(call)}\n</tool_call>"),
    }


def rounds(
    grammars: list[GuardedGrammar], texts: list[list[int]], vocab: int, num_drafts: int
) -> dict[str, float]:
    """Medians of milliseconds per round, until the first text ends."""
    places, masks, accepts, number = [0] * len(grammars), [], [], 0
    masked, words = RoundGrammars(), max(grammar.num_words for grammar in grammars)
    room = np.zeros((len(grammars) * (num_drafts + 1), words), np.int32)
    while all(at + num_drafts + 1 < len(ids) for at, ids in zip(places, texts, strict=True)):
        drafts = [ids[at : at + num_drafts] for at, ids in zip(places, texts, strict=True)]
        is_wrong = num_drafts > 0 and number % 3 == 2
        if is_wrong:
            drafts = [[*own[:-1], (own[-1] + 1) % vocab] for own in drafts]
        started = time.perf_counter()
        rows = MaskRows(room)
        masked.begin(dict(enumerate(grammars)), rows)
        masked.masks(dict(enumerate(zip(grammars, drafts, strict=True))), rows)
        masks.append(time.perf_counter() - started)
        count = num_drafts if is_wrong else num_drafts + 1
        started = time.perf_counter()
        chosen = [own[at : at + count] for own, at in zip(texts, places, strict=True)]
        found = masked.accept(list(zip(grammars, chosen, strict=True)))
        accepts.append(time.perf_counter() - started)
        assert found == [count] * len(grammars)
        places, number = [at + count for at in places], number + 1
    return {
        "masks_ms": round(1e3 * statistics.median(masks), 3),
        "worst_masks_ms": round(1e3 * max(masks), 3),
        "accepts_ms": round(1e3 * statistics.median(accepts), 3),
        "rounds": number,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=3)
    given = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given.tokenizer)
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, given.vocab, end_ids=[end], max_seconds=60)
    found: dict[str, Any] = {}
    for name, (spec, text) in cases().items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        grammars = []
        for number in range(given.requests):
            grammar = GuardedGrammar(compiler.compile(spec), given.vocab)
            for token in ids[: number % 8]:
                assert grammar.accept(token)
            grammars.append(grammar)
        texts = [ids[number % 8 :] for number in range(given.requests)]
        found[name] = rounds(grammars, texts, given.vocab, given.drafts)
        print(name, found[name], flush=True)
    compiler.close()
    facts = {"vocab": given.vocab, "requests": given.requests, "drafts": given.drafts}
    print(json.dumps({**facts, "cores": os.cpu_count(), "cases": found}))


if __name__ == "__main__":
    main()
