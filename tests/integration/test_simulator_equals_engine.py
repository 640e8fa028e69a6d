"""The simulator predicts the engine's own counters, exactly, for every K at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine_records import records
from support.engine_runs import (
    VOCAB,
    assert_head_is_alive,
    checkpoint,
    make_prompts,
    run,
    soft,
    start,
)
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import Rates
from headstart.simulate.scoring import WHOLE, score
from headstart.vocab.draft_vocab import DraftVocab

MAX_DRAFTS = unless_long(5, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "FastMTP's sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "hot, with a least length": {"temperature": 1.2, "min_p": 0.01, "min_tokens": 9},
}
REDUCED = DraftVocab(ids=tuple(i for i in range(VOCAB) if i % 7), name="reduced")
WAYS = {WHOLE: "none", "reduced": "reduced"}


PROMPTS = make_prompts(5)


def seeded(params: SamplingParams) -> list[SamplingParams]:
    return [replace(params, seed=100 + number) for number in range(len(PROMPTS))]


def plain_answers(engine: Engine, params: SamplingParams) -> list[Result]:
    return run(engine, PROMPTS, [replace(p, speculate=0) for p in seeded(params)])


def drafted_answers(engine: Engine, params: SamplingParams) -> dict[str, list[list[Result]]]:
    """Those of every K by way of drafting, all in one batch."""
    drafted: dict[str, list[list[Result]]] = {}
    for way, vocab in WAYS.items():
        every = [
            replace(p, speculate=k, draft_vocab=vocab)
            for k in range(MAX_DRAFTS + 1)
            for p in seeded(params)
        ]
        found = run(engine, PROMPTS * (MAX_DRAFTS + 1), every)
        size = len(PROMPTS)
        drafted[way] = [found[i : i + size] for i in range(0, len(found), size)]
    return drafted


def predicted(engine: Engine, plain: list[Result], params: SamplingParams) -> dict[str, Any]:
    """way -> record -> counters by K."""
    known = records(plain, params)
    plan = make_plan(known, None, "match")
    assert plan.method == "replay"
    found = score(
        engine.model, known, plan, max_drafts=MAX_DRAFTS, end_ids=engine.prompts.end_ids,
        vocabs={WHOLE: lambda record: None, "reduced": lambda record: REDUCED},
    )  # fmt: skip
    result: dict[str, dict[str, list[Acceptance]]] = {}
    for way, scores in found.items():
        for name, part in scores.parts.items():
            assert isinstance(part.found, Rates)
            result.setdefault(way, {})[name] = part.found.walked
    return result


# Settings do to one family what they do to another: each of them with one.
ALL = [(family, setting) for family in ("mimo", "llama", "qwen3") for setting in SETTINGS]
SOME = ALL[::4]


@pytest.mark.parametrize(("family", "setting"), unless_long(SOME, ALL))
def test_simulator_equals_engine_per_depth_for_every_k(
    family: str, setting: str, tiny: Tiny
) -> None:
    params = SamplingParams(max_tokens=26, stop_token_ids=(11, 29), **SETTINGS[setting])
    folder = (soft if params.temperature > 1 else checkpoint)(tiny, family)
    engine = start(folder, speculate=1, slots=60000, draft_vocab=[REDUCED])
    plain, drafted = plain_answers(engine, params), drafted_answers(engine, params)
    expected = predicted(engine, plain, params)
    for way, by_k in drafted.items():
        for drafts, results in enumerate(by_k):
            for number, result in enumerate(results):
                output = result.outputs[0]
                assert output.token_ids == plain[number].outputs[0].token_ids
                assert output.stats.acceptance == expected[way][f"r{number}"][drafts], (way, drafts)
        assert_head_is_alive(by_k[3])
        total = Acceptance()
        for result in by_k[3]:
            total.add(result.stats.acceptance)
        assert all(0.2 <= rate <= 0.9 for rate in total.conditional[:2])
    reasons = {r.outputs[0].finish_reason for r in plain}
    assert reasons == {"stop", "length"}, "both ways to end must occur"
    assert expected[WHOLE] != expected["reduced"]


def test_a_head_run_otherwise_is_predicted_otherwise(tiny: Tiny) -> None:
    """The control: the fusion order swapped, and the noise of another seed."""
    params = SamplingParams(max_tokens=26, **SETTINGS["FastMTP's sampling"])
    engine = start(checkpoint(tiny, "mimo"), speculate=1, slots=60000, draft_vocab=[REDUCED])
    plain = plain_answers(engine, params)
    right = predicted(engine, plain, params)[WHOLE]
    other_noise = [replace(r, outputs=[replace(r.outputs[0], stats=_seed(r))]) for r in plain]
    assert predicted(engine, other_noise, params)[WHOLE] != right
    head = engine.model.head
    assert head is not None
    for part in (head, *head.modules_):
        part.layout = replace(head.layout, fuse_order="embed_first")
    assert predicted(engine, plain, params)[WHOLE] != right


def _seed(result: Result) -> Any:
    stats = result.outputs[0].stats
    return replace(stats, seed=stats.seed + 1)


@pytest.mark.parametrize("topology", unless_long(["chained"], ["chained", "parallel"]))
def test_heads_of_several_modules_are_predicted_as_well(topology: str, tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    folder = checkpoint(tiny, "mimo", num_nextn_predict_layers=3)
    engine = start(folder, speculate=1, slots=60000, topology=topology, draft_vocab=[REDUCED])
    plain, drafted = plain_answers(engine, params), drafted_answers(engine, params)
    expected = predicted(engine, plain, params)
    for way, by_k in drafted.items():
        for drafts, results in enumerate(by_k):
            for number, result in enumerate(results):
                assert result.stats.acceptance == expected[way][f"r{number}"][drafts]
