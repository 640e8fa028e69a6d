"""Every sampling setting on a CPU's compiled kernels: the text for a seed depends on neither K nor
the compiled chooser, with every setting beside every other."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from support.engine_runs import VOCAB, make_prompts, run, soft, start
from support.tiny_fixture import Tiny

from headstart.backends.chooser import Chooser
from headstart.backends.numba import support
from headstart.engine.engine import Engine
from headstart.engine.options import Speculate
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(support.why_missing() is not None, reason="no numba here")

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.83},
    "min-p": {"min_p": 0.04},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.5},
    "bias": {"logit_bias": {7: 1.5, 40: -3.0}},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
    "banned": {"banned_token_ids": (8, 9, 11)},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": tuple(range(20, 40))},
    "log-probabilities": {"logprobs": 3},
    "processed": {"logprobs": 1, "logprobs_mode": "processed"},
}
PAIRS = [{**SETTINGS[a], **SETTINGS[b]} for a, b in combinations(SETTINGS, 2)]
EVERYTHING = {name: value for own in SETTINGS.values() for name, value in own.items()}
LENGTH = 14


def asked(fields: list[dict[str, Any]], **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": LENGTH, "seed": 3, "ignore_eos": True, **own, **more})
        for own in fields
    ]


def texts(engine: Engine, fields: list[dict[str, Any]], **more: Any) -> list[Any]:
    """Tokens with their log-probabilities; so many requests share a batch."""
    prompts = make_prompts()
    many = [prompts[i % len(prompts)] for i in range(len(fields))]
    outputs = [result.outputs[0] for result in run(engine, many, asked(fields, **more))]
    return [(o.token_ids, [(told.logprob, told.top) for told in o.logprobs or ()]) for o in outputs]


def compiled(tiny: Tiny, k: Speculate) -> Engine:
    engine = start(
        soft(tiny), speculate=k, dtype="float32", threads=1, slots=6000, max_running_requests=128
    )
    assert engine.backend.name == "numba"
    return engine


def test_no_setting_makes_the_text_depend_on_the_number_of_drafts(tiny: Tiny) -> None:
    fields = [*PAIRS, EVERYTHING, {**EVERYTHING, "temperature": 1.1}]
    plain = texts(compiled(tiny, 0), fields)
    assert len({str(tokens) for tokens, _ in plain}) > len(fields) // 2
    for k in (1, 2, 3, 4, 5, "auto"):
        assert texts(compiled(tiny, k), fields) == plain, f"K = {k}"


def test_texts_are_those_of_the_reference(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before there was a compiled chooser, tokens for tokens."""
    fields = [*PAIRS, EVERYTHING, {**EVERYTHING, "temperature": 1.1}]
    found = texts(compiled(tiny, 0), fields)
    slow = compiled(tiny, 0)
    for name in ("choose", "choose_drafts", "draft_probs", "reject", "logprobs"):
        monkeypatch.setattr(slow.backend, name, getattr(Chooser, name).__get__(slow.backend))
    wanted = texts(slow, fields)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, told), (_, wanted_told) in zip(found, wanted, strict=True):
        values, wanted_values = ([value for value, _ in each] for each in (told, wanted_told))
        assert values == pytest.approx(wanted_values, abs=1e-4)
        for (_, best), (_, wanted_best) in zip(told, wanted_told, strict=True):
            assert len(best) == len(wanted_best)


def test_the_rejection_rule_gives_the_same_text_at_once_and_depth_by_depth(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the reference: its noise is the same."""
    fields = [
        SETTINGS[name] for name in ("cold", "top-k", "top-p", "presence", "bias", "processed")
    ]
    chained = compiled(tiny, 3)
    found = texts(chained, fields, acceptance="rejection")
    assert chained.stats.acceptance.length > 1.1
    slow = compiled(tiny, 3)
    monkeypatch.setattr(slow.backend, "drafts_chains", False)
    assert texts(slow, fields, acceptance="rejection") == found
    for name in ("choose", "choose_drafts", "draft_probs", "reject"):
        monkeypatch.setattr(slow.backend, name, getattr(Chooser, name).__get__(slow.backend))
    again = texts(slow, fields, acceptance="rejection")
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found]


class Even:
    """A grammar of even tokens."""

    def allowed(self) -> torch.Tensor:
        return torch.arange(VOCAB) % 2 == 0

    def accept(self, token: int) -> bool:
        return token % 2 == 0

    def fork(self) -> Even:
        return self


def test_a_grammar_goes_with_every_setting(tiny: Tiny) -> None:
    prompts, found = make_prompts()[:1] * len(SETTINGS), []
    for k in (0, 3):
        engine = compiled(tiny, k)
        results = engine.generate(prompts, asked(list(SETTINGS.values())), grammar=Even())
        found.append([result.outputs[0].token_ids for result in results])
    assert found[0] == found[1]
    assert all(token % 2 == 0 for tokens in found[0] for token in tokens)
