"""Rounds in which requests draft their own text's tokens, by interpreted kernels on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import ids_of
from support.kernel_runs import SIZES, start
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab

pytestmark = pytest.mark.usefixtures("quick_kernels")

VOCAB, LIMIT = SIZES["vocab_size"], 30
# The model walks a cycle of all tokens: what it writes is its own where the prompt has it.
PROMPTS = [[*range(2, VOCAB, 2), 5], [5, 20, 31], [*range(VOCAB - 1, 2, -2), 11, 40]]
LISTS = [
    DraftVocab.of(range(0, VOCAB, 3), name="third", vocab_size=VOCAB),
    DraftVocab.of(range(1, VOCAB, 2), name="odd", vocab_size=VOCAB),
]
PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = {
    "greedy": [PLAIN, PLAIN, replace(PLAIN, temperature=0.8, seed=3)],
    "processed": [
        replace(PLAIN, temperature=0.9, seed=4, top_p=0.9),
        replace(PLAIN, temperature=0.9, seed=5, top_k=6, logit_bias={7: 1.0}), PLAIN,
    ],
    "rejecting": [
        replace(PLAIN, temperature=0.9, seed=4, acceptance="rejection"), PLAIN,
        replace(PLAIN, temperature=0.6, seed=6, top_k=9, acceptance="rejection"),
    ],
}  # fmt: skip


@pytest.fixture
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


def answers(engine: Engine, params: list[SamplingParams], names: list[str]) -> Any:
    asked = [replace(own, draft_vocab=name) for own, name in zip(params, names, strict=True)]
    results = engine.generate(PROMPTS, asked)
    return ids_of(results), [r.stats.acceptance for r in results]


@pytest.mark.parametrize("kind", unless_long(["processed"], list(KINDS)))
def test_rounds_draft_what_the_plain_engine_drafts(kind: str, folder: Path) -> None:
    """Three requests for two places, so that one moves; with two lists and the whole vocabulary."""
    names = ["third", "odd", "full"] if kind == "greedy" else ["third", "odd", "third"]
    own = {"draft_vocab": LISTS, "draft_vocab_own": LIMIT, "speculate": 2}
    fused, plain = start(folder, "on", **own), start(folder, "off", **own)
    assert (fused.backend.name, plain.backend.name) == ("cuda", "torch")
    found, wanted = (answers(engine, KINDS[kind], names) for engine in (fused, plain))
    assert found == wanted
    assert fused.stats.fast_rounds and not fused.stats.slow_rounds
    # The list alone gives the same texts, but where the draft's distribution decides.
    alone = start(folder, "off", draft_vocab=LISTS, speculate=2)
    texts, acceptance = answers(alone, KINDS[kind], names)
    assert acceptance != wanted[1], "own tokens are drafted"
    if kind != "rejecting":
        assert texts == wanted[0]
