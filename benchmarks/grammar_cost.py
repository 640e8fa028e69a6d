"""What a grammar costs: to compile, per token, and for the others in its batch.

The vocabulary is made up (bytes and words of random letters, 151,936 tokens, as many as Qwen's), so
that nothing has to be downloaded; a real one has more tokens that fit into strings.

    python benchmarks/grammar_cost.py

The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.engine.grammar import GuardedGrammar
from headstart.sampling.choose import choose
from headstart.sampling.params import Row, SamplingParams
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import GrammarSpec, json_object, json_schema, regex

VOCAB, END, BATCH, DRAFTS = 151_936, 0, 32, 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
TEXT = '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "engines", "poetry"]}'
CASES: dict[str, tuple[GrammarSpec, str]] = {
    "JSON object": (json_object(), TEXT),
    "JSON schema": (json_schema(SCHEMA), TEXT),
    "regex": (regex(r"(\d{1,3}\.){3}\d{1,3}"), "192.168.100.200"),
}


def made_up_tokenizer() -> PreTrainedTokenizerFast:
    draw = random.Random(0)
    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    seen = set(words)
    while len(words) < VOCAB - 200:
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
        word = draw.choice(["", "\u0120"]) + word  # a leading space, as byte-level tokens spell it
        if word not in seen:
            seen.add(word)
            words.append(word)
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def microseconds(function: Callable[[], Any], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def follow(compiler: GrammarCompiler, spec: GrammarSpec, ids: list[int]) -> dict[str, float]:
    """Medians over the tokens of a text."""
    started = time.perf_counter()
    grammar = compiler.compile(spec)
    seconds = time.perf_counter() - started
    masks, forks, accepts = [], [], []
    for token in ids:
        masks.append(microseconds(grammar.allowed, 3))
        forks.append(microseconds(grammar.fork, 3))
        started = time.perf_counter()
        assert grammar.accept(token)
        accepts.append((time.perf_counter() - started) * 1e6)
    return {
        "compile_ms": seconds * 1e3, "mask_us": statistics.median(masks),
        "worst_mask_us": max(masks), "fork_us": statistics.median(forks),
        "accept_us": statistics.median(accepts),
    }  # fmt: skip


def batch(compiler: GrammarCompiler, num_masked: int, temperature: float) -> float:
    """Milliseconds to choose for a whole batch, the masks of its grammars included."""
    params = SamplingParams(temperature=temperature, top_k=20 if temperature else 0)
    logits = torch.randn(BATCH * (1 + DRAFTS), VOCAB, generator=torch.Generator().manual_seed(0))
    drafts = [int(token) for token in compiler_ids(TEXT)[1 : 1 + DRAFTS]]

    def step() -> None:
        rows = []
        for request in range(BATCH):
            masks: list[torch.Tensor | None] = [None] * (1 + DRAFTS)
            if request < num_masked:
                grammar = GuardedGrammar(starts[request].fork(), VOCAB)
                masks = grammar.masks(drafts)
            rows += [Row(params, seed=request, position=i, mask=m) for i, m in enumerate(masks)]
        choose(logits, rows)

    starts = [compiler.compile(CASES["JSON schema"][0]) for _ in range(num_masked)]
    for grammar in starts:
        grammar.accept(compiler_ids(TEXT)[0])
    return microseconds(step, 5) / 1e3


def compiler_ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


TOKENIZER = made_up_tokenizer()


def main() -> None:
    torch.set_num_threads(1)
    compiler = GrammarCompiler(TOKENIZER, VOCAB, end_ids=[END], max_seconds=30)
    compiler.compile(regex("warm-up"))  # the process that compiles is running now
    found: dict[str, Any] = {"vocabulary": VOCAB, "follow": {}, "batch_ms": {}}
    for name, (spec, text) in CASES.items():
        figures = follow(compiler, spec, [*compiler_ids(text), END])
        found["follow"][name] = {key: round(value, 1) for key, value in figures.items()}
        print(name, found["follow"][name])
    for temperature in (0.0, 1.0):
        for num_masked in (0, 1, BATCH):
            value = round(batch(compiler, num_masked, temperature), 1)
            found["batch_ms"][f"temperature {temperature:g}, {num_masked} of {BATCH}"] = value
            print(
                f"temperature {temperature:g}: {num_masked} of {BATCH} with a grammar, {value} ms"
            )
    compiler.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
