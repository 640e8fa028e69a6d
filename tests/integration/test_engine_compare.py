"""With and without drafts: the report says where two texts part, and how close it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine_runs import PROMPT, VOCAB, greedy, seeded, soft, start
from support.tiny_fixture import Tiny

from headstart.engine.compare import compare_runs, find_divergence
from headstart.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Engine:
    """Few rows per step: the text before a divergence is longer than one chunk."""
    return start(soft(tiny), speculate=3, max_batched_tokens=8)


def changed_at(engine: Engine, place: int) -> Any:
    """An engine's `generate` whose drafted answers have another token at `place`."""
    generate = engine.generate

    def wrong(prompts: Any, params: Any) -> Any:
        results = generate(prompts, params)
        if params.speculate != 0:
            ids = results[0].outputs[0].token_ids
            ids[place] = (ids[place] + 1) % VOCAB
        return results

    return wrong


def test_texts_that_are_the_same_have_no_divergence(engine: Engine) -> None:
    report = compare_runs(engine, PROMPT, seeded())
    assert report.divergence is None
    assert report.as_json()["equal"] is True
    assert "identical (24 tokens)" in report.describe()
    assert report.acceptance_length == pytest.approx(1 + sum(report.accepted_per_round))
    rates = " / ".join(f"{rate:.2f}" for rate in report.accepted_per_round)
    assert rates and f"{rates} per round by depth" in report.describe()


def test_a_divergence_is_reported_as_often_as_asked_and_stops_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the second report failed with an id in use, a long text with an IndexError."""
    monkeypatch.setattr(engine, "generate", changed_at(engine, 17))
    for _ in range(2):
        report = compare_runs(engine, PROMPT, greedy(24))
        assert report.divergence is not None
        assert report.divergence.position == 17
        assert "differ from token 17 on" in report.describe()
    assert (engine.has_work, engine.pool.num_used, len(engine._groups)) == (False, 0, 0)


@pytest.mark.parametrize("at", [0, 5, 20])
def test_the_raw_gap_is_that_of_the_trunks_logits(at: int, engine: Engine) -> None:
    params = greedy(24, logprobs=VOCAB)
    output = engine.generate([PROMPT], params)[0].outputs[0]
    assert output.logprobs is not None
    ids, top = output.token_ids, output.logprobs[at].top
    second = list(top)[1]
    found = find_divergence(engine, PROMPT, params, ids, [*ids[:at], second])
    assert found is not None
    assert (found.position, found.plain_token, found.drafted_token) == (at, ids[at], second)
    assert found.logit_gap == pytest.approx(top[ids[at]] - top[second], abs=1e-9)
    assert found.decision_gap == pytest.approx(found.logit_gap)


def test_at_a_temperature_the_gap_is_that_of_what_decided(engine: Engine) -> None:
    """The chosen token wins by the gap: a bias just above it turns the choice, just below not."""
    params = seeded(temperature=0.8, repetition_penalty=1.3, max_tokens=1)
    ids = engine.generate([PROMPT], params)[0].outputs[0].token_ids
    rival = next(token for token in range(2, VOCAB) if token not in [*ids, *PROMPT])
    found = find_divergence(engine, PROMPT, params, ids, [rival])
    assert found is not None and found.decision_gap is not None
    choices = []
    for factor in (0.99, 1.01):
        bias = {rival: found.decision_gap * params.temperature * factor}
        output = engine.generate([PROMPT], replace(params, logit_bias=bias))[0].outputs[0]
        choices += output.token_ids
    assert choices == [ids[0], rival]
    assert found.decision_gap != pytest.approx(found.logit_gap)


def test_where_something_else_decides_no_gap_is_claimed(engine: Engine) -> None:
    params = seeded(acceptance="rejection")
    ids = engine.generate([PROMPT], params)[0].outputs[0].token_ids
    found = find_divergence(engine, PROMPT, params, ids, [*ids[:3], (ids[3] + 1) % VOCAB])
    assert found is not None
    assert found.decision_gap is None


def test_a_text_that_ends_early_is_not_the_same(engine: Engine) -> None:
    found = find_divergence(engine, PROMPT, greedy(4), [5, 6, 7], [5, 6])
    assert found is not None
    assert (found.position, found.plain_token, found.drafted_token) == (2, 7, None)
    assert found.reason == "one ends there"
    assert find_divergence(engine, PROMPT, greedy(4), [5, 6], [5, 6]) is None


def test_copied_tokens_are_reported_where_there_are_any(engine: Engine) -> None:
    prompt = [*PROMPT, *engine.generate([PROMPT], greedy(30))[0].outputs[0].token_ids, *PROMPT]
    copying = compare_runs(engine, prompt, greedy(20, draft_from="context", speculate=8))
    assert copying.divergence is None and copying.copied_tokens > 0
    assert f"copied           {copying.copied_tokens:8} tokens, from the" in copying.describe()
    drafting = compare_runs(engine, prompt, greedy(20))
    assert drafting.copied_tokens == 0 and "copied" not in drafting.describe()


@pytest.mark.parametrize("draft_from", ["auto", "context"])
def test_the_run_without_drafts_copies_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, draft_from: Any
) -> None:
    plain, generate = list[Any](), engine.generate

    def watched(prompts: Any, params: Any) -> Any:
        results = generate(prompts, params)
        plain.extend((params, results[0].stats) for _ in [0] if params.speculate == 0)
        return results

    monkeypatch.setattr(engine, "generate", watched)
    compare_runs(engine, [*PROMPT, *PROMPT], greedy(12, draft_from=draft_from))
    assert [(params.draft_from, stats.num_drafted) for params, stats in plain] == [("head", 0)] * 2
