"""Drafts copied from the context change speed and nothing else, whatever else a request asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.copying_runs import (
    assert_copies_are_alive,
    copied,
    origins_of,
    prompts_of,
    take_all_copies,
    with_both,
)
from support.engine_runs import VOCAB, checkpoint, greedy, ids_of, run, seeded, soft, start
from support.head_edits import edited
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.backends.numba import support
from headstart.engine import copies
from headstart.errors import ConfigError, RequestError
from headstart.simulate.copies import copied_rounds

pytestmark = pytest.mark.usefixtures("no_clock")

SETTINGS = {
    "greedy": greedy(),
    "sampled": seeded(temperature=0.8),
    "penalties": seeded(temperature=0.7, repetition_penalty=1.2, frequency_penalty=-1.5),
    "truncated": seeded(temperature=1.0, top_p=0.9, top_k=12, min_p=0.01),
    "biased": seeded(temperature=0.9, logit_bias={3: 2.0, 5: -3.0}, banned_token_ids=(7, 8)),
    "log-probabilities": seeded(temperature=0.8, logprobs=2, min_tokens=4),
}
FAMILIES = [
    "mimo", "qwen3_next", "deepseek_v3", "mimo_v2", "qwen3_5_moe", "nemotron_h", "step3p5",
    "deepseek_v32", "bailing_moe_v3", "exaone_moe",
]  # fmt: skip
MORE_FAMILIES = [
    "deepseek_v4", "qwen4_exp", "glm5_next", "hy_v4", "glm4_moe", "mellum", "ernie4_5_moe",
    "llama", "exaone4_5", "qwen3",
]  # fmt: skip


@pytest.fixture(scope="module")
def flat(tiny: Tiny) -> Path:
    return soft(tiny)


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_those_without_drafts(flat: Path, name: str) -> None:
    params = SETTINGS[name]
    plain = run(start(flat, speculate=0), prompts_of(flat), params)
    engine = start(flat, speculate=3)
    results = run(engine, prompts_of(flat), copied(params))
    assert ids_of(results) == ids_of(plain)
    assert_copies_are_alive(results)
    stats = engine.stats
    assert 0 < stats.copied_accepted < stats.copied_drafts
    for one, other in zip(plain, results, strict=True):
        asked = one.outputs[0].logprobs or []
        found = [each.logprob for each in other.outputs[0].logprobs or []]
        assert found == pytest.approx([each.logprob for each in asked])
    assert "accepted" not in origins_of(results)  # the head was not asked
    assert sum(r.stats.copied_accepted for r in results) == stats.copied_accepted


@pytest.mark.parametrize("drafts", [1, 5, 16])
def test_every_number_of_copied_drafts_gives_the_same_text(flat: Path, drafts: int) -> None:
    params = SETTINGS["sampled"]
    plain = ids_of(run(start(flat, speculate=0), prompts_of(flat), params))
    results = run(start(flat, speculate=3), prompts_of(flat), copied(params, drafts))
    assert ids_of(results) == plain
    most = max(k for r in results for k, _ in r.stats.rounds)
    assert most == drafts


@pytest.mark.parametrize("drafts", [3, 16])
def test_rounds_are_replayed_from_the_text_alone(flat: Path, drafts: int) -> None:
    prompts, params = prompts_of(flat), SETTINGS["sampled"]
    results = run(start(flat, speculate=3), prompts, copied(params, drafts))
    for prompt, result in zip(prompts, results, strict=True):
        replayed = copied_rounds(prompt, result.outputs[0].token_ids, drafts, params.max_tokens)
        assert replayed == result.stats.rounds
    wrong = [
        copied_rounds(p[::-1], r.outputs[0].token_ids, drafts)
        for p, r in zip(prompts, results, strict=True)
    ]
    assert wrong != [result.stats.rounds for result in results]


@pytest.mark.parametrize("family", unless_long(FAMILIES, [*FAMILIES, *MORE_FAMILIES]))
def test_every_kind_of_model_copies(tiny: Tiny, family: str) -> None:
    folder = checkpoint(tiny, family)
    prompts = prompts_of(folder)
    plain = ids_of(run(start(folder, speculate=0), prompts, greedy()))
    results = run(start(folder, speculate=3), prompts, copied(greedy()))
    assert ids_of(results) == plain
    assert_copies_are_alive(results)


@pytest.mark.skipif(support.why_missing() is not None, reason="no numba here")
@pytest.mark.parametrize("weights", ["int8", "as-dtype"])
@pytest.mark.parametrize("family", ["mimo", "qwen3_5_moe", "deepseek_v3", "mimo_v2"])
def test_compiled_passes_verify_copies_and_change_no_bit(
    tiny: Tiny, family: str, weights: str
) -> None:
    folder = soft(tiny, family)
    settings: dict[str, Any] = {"weights": weights, "dtype": "float32", "slots": 2400}
    prompts, params = prompts_of(folder), greedy(30, logprobs=1)
    plain = start(folder, speculate=0, **settings)
    wanted = run(plain, prompts, params)
    by_head_too = with_both(folder, **settings)
    for engine, asked in (
        (start(folder, speculate=3, **settings), copied(params)), (by_head_too, params),
    ):  # fmt: skip
        assert engine.backend.name == "numba"
        results = run(engine, prompts, asked)
        assert_copies_are_alive(results)
        assert ("accepted" in origins_of(results)) == (engine is by_head_too)
        assert max(k for r in results for k, _ in r.stats.rounds) == 16
        for one, other in zip(results, wanted, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_head_and_copies_take_turns_in_one_text(flat: Path) -> None:
    params = greedy(60)
    plain = run(start(flat, speculate=0), prompts_of(flat), params)
    results = run(with_both(flat), prompts_of(flat), params)
    assert ids_of(results) == ids_of(plain)
    assert origins_of(results) == {"accepted", "copied", "recovered", "bonus"}
    # The head's first drafts, then a copy that agrees with them, in one round.
    pairs = {
        pair for r in results for o in r.outputs
        for pair in zip(o.origins, o.origins[1:], strict=False)
    }  # fmt: skip
    assert ("accepted", "copied") in pairs


def test_little_memory_prefix_hits_and_preemption(flat: Path) -> None:
    params = SETTINGS["sampled"]
    plain = ids_of(run(start(flat, speculate=0), prompts_of(flat), params))
    engine = with_both(flat, slots=160, max_batched_tokens=32)
    results = run(engine, prompts_of(flat), params)
    again = run(engine, prompts_of(flat), params)
    assert ids_of(results) == ids_of(again) == plain
    assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
    assert_copies_are_alive(results)


def test_a_prompt_is_indexed_as_it_is_read_and_step_by_step_after_a_prefix_hit(
    flat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "INDEXED_AT_ONCE", 20)
    engine, prompt = start(flat, speculate="context", max_batched_tokens=32), prompts_of(flat)[0]
    assert engine.loop.sources is not None
    drafter, missing = engine.loop.sources.copies, list[list[int]]()
    for _ in range(2):
        engine.add(prompt, greedy(8))
        (one,) = engine.scheduler.waiting
        own = list[int]()
        while one.finish_reason is None:
            engine.step()
            if one.num_output and one.id in drafter._texts:
                own.append(len(one.tokens) - drafter._texts[one.id].end)
        missing.append(own)
    assert one.stats.num_cached_tokens > 40
    assert set(missing[0]) == {0} and missing[1][0] > 20, missing
    assert all(before - after >= 19 or not after
               for before, after in zip(missing[1], missing[1][1:], strict=False))  # fmt: skip


def test_a_preempted_request_drops_what_it_could_copy(flat: Path) -> None:
    """Regression: a copy that was found before stayed, for whatever ran the request later."""
    engine = with_both(flat)
    assert engine.loop.sources is not None
    drafter = engine.loop.sources.copies
    engine.add(prompts_of(flat)[0], SETTINGS["sampled"])
    (one,) = engine.scheduler.waiting
    while drafter.found(one) is None:
        engine.step()
    engine.scheduler.take_restarted = lambda: [one]
    engine.loop._forget_restarted()
    assert drafter.found(one) is None


def test_aborted_requests_leave_nothing_behind(flat: Path) -> None:
    engine = with_both(flat)
    plain = ids_of(run(start(flat, speculate=0), prompts_of(flat)[:2], SETTINGS["sampled"]))
    doomed = [engine.add(prompt, SETTINGS["sampled"]) for prompt in prompts_of(flat)[2:6]]
    kept = [engine.add(prompt, SETTINGS["sampled"]) for prompt in prompts_of(flat)[:2]]
    for _ in range(4):
        engine.step()
    for name in doomed:
        engine.abort(name)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert ids_of([engine.collect(name) for name in kept]) == plain
    assert engine.loop.sources is not None
    assert not engine.loop.sources.copies._texts


def test_the_rejection_rule_takes_copies_for_certain_drafts(flat: Path) -> None:
    params = seeded(temperature=1.0, acceptance="rejection", max_tokens=40)
    results = run(with_both(flat), prompts_of(flat), params)
    assert_copies_are_alive(results)
    assert all(0 <= token < VOCAB for one in ids_of(results) for token in one)


def test_a_model_without_a_head_drafts_from_its_context(tiny: Tiny) -> None:
    folder = tiny("llama", **{**_PLAIN, "rate": 0.9})
    prompts = prompts_of(folder)
    plain = ids_of(run(start(folder, speculate=0), prompts, greedy()))
    engine = start(folder, speculate="context")
    take_all_copies(engine)
    results = run(engine, prompts, greedy())
    assert engine.model.head is None and ids_of(results) == plain
    assert {"copied", "bonus"} <= origins_of(results)
    numbered = run(start(folder, speculate="context"), prompts, greedy(speculate=3))
    assert ids_of(numbered) == plain
    assert max(k for r in numbered for k, _ in r.stats.rounds) == 3
    with pytest.raises(RequestError, match="without a head"):
        engine.add([1, 2], greedy(draft_from="head"))
    with pytest.raises(RequestError, match="without drafts"):
        start(folder, speculate=0).add([1, 2], greedy(draft_from="context"))


_PLAIN: dict[str, Any] = {
    "seed": 1, "dtype": "F32", "hidden_size": 128, "vocab_size": 64, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 2, "with_head": False,
}  # fmt: skip


def test_the_policy_itself_copies_where_that_pays(flat: Path) -> None:
    """Rows cost nothing here and the head's steps do: long matches that are right are copied."""
    from headstart.engine.auto.costs import RoundCosts
    from headstart.engine.auto.live_costs import LiveCosts

    engine = start(flat, speculate="auto")
    table = RoundCosts(((1, ((0, 1.0), (16, 1.2))), (16, ((0, 1.0), (16, 1.2)))), ((1, 0.3),))
    assert engine.policy is not None
    engine.policy._costs = engine.policy._greedy_costs = LiveCosts(table)
    engine.policy._costs.observe_verify = lambda *given: None
    engine.policy._costs.observe_drafts = lambda *given: None
    params = greedy(max_tokens=200)
    results = run(engine, prompts_of(flat)[:1], params)
    assert ids_of(results) == ids_of(run(start(flat, speculate=0), prompts_of(flat)[:1], params))
    assert results[0].stats.copied_accepted > 60  # greedy text of a small model soon repeats
    only_head = run(engine, prompts_of(flat)[:1], replace(params, draft_from="head"))
    assert only_head[0].stats.copied_drafts == 0


def test_other_answers_are_copied_only_where_asked_and_by_salt(flat: Path) -> None:
    params = seeded(temperature=1.0, max_tokens=60)
    lone = [5, 9, 13, 17, 21, 33]
    engine = start(flat, speculate="context", draft_from_answers=2)
    take_all_copies(engine)
    first, again = (run(engine, [lone], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert again.stats.copied_accepted > first.stats.copied_accepted + 20
    other = run(engine, [lone], params, cache_salt="someone else")[0]
    assert other.stats.copied_accepted == first.stats.copied_accepted
    with pytest.raises(ConfigError, match="draft_from_answers"):
        start(flat, speculate=3, draft_from_answers=2)


def test_a_copy_from_the_wrong_place_is_refused_by_the_trunk(flat: Path, tmp_path: Path) -> None:
    """The control: another trunk refuses what this one's context would go on with."""

    def shuffle(own: dict[str, torch.Tensor]) -> None:
        own["lm_head.weight"] = own["lm_head.weight"].roll(1, 0)

    other = edited(flat, tmp_path / "rolled", change=shuffle)
    right, wrong = (
        run(start(folder, speculate=3), prompts_of(flat), copied(greedy(6)))
        for folder in (flat, other)
    )
    shares = [
        sum(r.stats.copied_accepted for r in each)
        / max(1, sum(r.stats.copied_drafts for r in each))
        for each in (right, wrong)
    ]
    assert shares[0] != shares[1]
