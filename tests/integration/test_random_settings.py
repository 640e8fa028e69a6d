"""Settings at random, all fields at once, many requests together, with hardly any memory: what
plain decoding gives, whatever drafts. Heads have several modules."""

from __future__ import annotations

from dataclasses import fields
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.copying_runs import Parity
from support.kernel_runs import SIZES
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.options import Speculate
from headstart.engine.output import Completion
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab

VOCAB, MODULES = SIZES["vocab_size"], 3
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 20, 31], [7], [3, 4, 5, 6, 7, 8, 9, 10, 20, 21]]
# What an answer depends on.
ASKED: dict[str, list[Any]] = {
    "temperature": [0, 0.6, 1.3, 2.0], "top_k": [0, 5, 30], "top_p": [1.0, 0.8, 0.95],
    "min_p": [0.0, 0.05], "repetition_penalty": [1.0, 1.3, 0.7], "presence_penalty": [0, 1.0, -1],
    "frequency_penalty": [0, 0.8, -0.7], "logit_bias": [None, {5: 4.0, 9: -3.0}],
    "allowed_token_ids": [None, tuple(range(50))], "banned_token_ids": [None, (3, 7, 20)],
    "min_tokens": [0, 3, 6], "stop_token_ids": [(), (8, 20, 21, 33, 40, 41)],
    "ignore_eos": [True, False], "stop": [(), ("t8 ", "t20 t"), ("t3",)],
    "include_stop_str_in_output": [False, True], "logprobs": [None, 0, 3, 20],
    "logprobs_mode": ["raw", "processed"], "n": [1, 2], "seed": [1, 2, 3], "max_tokens": [12],
}  # fmt: skip
# And what it does not depend on.
DRAFTED: dict[str, list[Any]] = {
    "speculate": [None, 0, 1, 2, 3, 4, 5], "draft_vocab": [None, "small", "large"],
    "draft_from": ["auto", "head", "context"],
}  # fmt: skip
OTHERS = {"detokenize", "skip_special_tokens", "prompt_logprobs", "acceptance"}


def test_every_field_is_among_them() -> None:
    named = {*ASKED, *DRAFTED, *OTHERS}
    assert named == {field.name for field in fields(SamplingParams)}


def drawn(source: dict[str, list[Any]], count: int, seed: int) -> list[dict[str, Any]]:
    draw = Random(seed)
    return [{name: draw.choice(own) for name, own in source.items()} for _ in range(count)]


def start(folder: Path, speculate: Speculate, **settings: Any) -> Engine:
    vocabs = [
        DraftVocab(ids=tuple(range(0, VOCAB, 2)), name="small"),
        DraftVocab(ids=tuple(range(VOCAB - 4)), name="large"),
    ]
    usual: dict[str, Any] = {"block_size": 4, "kv_bytes": 1 << 22, "threads": 1, "device": "cpu"}
    if speculate != 0:
        usual["draft_vocab"] = vocabs
    return Engine(folder, dtype="float32", speculate=speculate, **{**usual, **settings})


def block_bytes(modules: int) -> int:
    """Of 4 tokens: K and V of all layers, and a state for each module."""
    return 4 * 2 * 16 * 4 * (1 + modules) + modules * 64 * 4


def outputs(engine: Engine, asked: list[dict[str, Any]], **options: Any) -> list[Completion]:
    prompts = [prompt for prompt, _ in zip(cycle(PROMPTS), asked, strict=False)]
    results = engine.generate(prompts, [SamplingParams(**own) for own in asked], **options)
    return [output for result in results for output in result.outputs]


def told(each: list[Completion]) -> list[Any]:
    return [(own.token_ids, own.text, own.finish_reason, own.stop_reason) for own in each]


def numbers(each: list[Completion]) -> list[float]:
    return [entry.logprob for own in each for entry in own.logprobs or ()]


QUICK: list[tuple[str, Speculate]] = [("numba", 3)]
LONG: list[tuple[str, Speculate]] = [
    (backend, k) for backend in ("numba", "cuda") for k in (0, 1, 2, 3, 4, 5, "auto")
]  # fmt: skip


@pytest.mark.parametrize("has_grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize(("backend", "speculate"), unless_long(QUICK, LONG))
def test_answers_are_those_of_plain_decoding(
    backend: str, speculate: Speculate, has_grammar: bool, tiny: Tiny,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    pytest.importorskip({"cuda": "triton", "numba": "numba"}[backend])
    if backend == "cuda":
        request.getfixturevalue("quick_kernels")
    sizes = {**SIZES, "num_nextn_predict_layers": MODULES}
    folder = tiny("mimo", rate=0.9, seed=4, dtype="F32", **sizes)
    asked = drawn(ASKED, 48 if backend == "numba" else 12, seed=int(has_grammar))
    options: dict[str, Any] = {"grammar": Parity()} if has_grammar else {}
    wanted = outputs(start(folder, 0, kernels="off"), asked, **options)
    kernels = {"cuda": "on", "numba": "auto"}[backend]
    memory = 40 * block_bytes(0 if speculate == 0 else MODULES)
    engine = start(folder, speculate, kernels=kernels, kv_bytes=memory)
    assert engine.backend.name == backend
    how = drawn(DRAFTED, len(asked), seed=2) if speculate != 0 else [{}] * len(asked)
    found = outputs(engine, [{**a, **b} for a, b in zip(asked, how, strict=True)], **options)
    assert told(found) == told(wanted)
    assert numbers(found) == pytest.approx(numbers(wanted), abs=1e-3)
    assert engine.stats.preemptions > 0 and engine.pool.num_used == 0
    assert {type(own.stop_reason) for own in wanted} >= {int, str, type(None)}
    if speculate not in (0, "auto"):
        assert {"accepted", "recovered", "bonus"} <= {o for own in found for o in own.origins}
