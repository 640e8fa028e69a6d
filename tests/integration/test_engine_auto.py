"""`auto`: K changes while requests run, and nothing but the speed changes with it."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import (
    PROMPT,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    seeded,
    soft,
    start,
)
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.engine import core
from headstart.engine.auto import profile
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.engine import Engine
from headstart.engine.stats import EngineStats

# Drafts pay for one or two requests; for more a row of drafts costs what a round does.
PAYS_FOR_FEW = RoundCosts(
    verify=((1, ((0, 1.0), (8, 1.4))), (2, ((0, 1.0), (8, 1.8))), (3, ((0, 1.0), (8, 9.0)))),
    draft=((1, 0.02),),
)


@pytest.fixture
def made_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a test machine decides nothing here."""
    monkeypatch.setattr(core, "profile_host_rounds", lambda *_, **__: (PAYS_FOR_FEW, None))
    monkeypatch.setattr(
        "headstart.engine.auto.corrections.HostCorrections.observe", lambda *_: None
    )


@pytest.mark.usefixtures("made_up_costs")
@pytest.mark.parametrize("slots", [100, 2000])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_text_is_the_same_while_k_rises_and_falls(slots: int, heat: float, tiny: Tiny) -> None:
    """Answers of many lengths: the batch begins large, without drafts, and ends small, with."""
    params = [seeded(temperature=heat, seed=i, max_tokens=8 + 5 * i) for i in range(10)]
    expected = ids_of(run(start(soft(tiny), speculate=0), make_prompts(), params))
    engine = start(soft(tiny), speculate="auto", slots=slots)
    results = run(engine, make_prompts(), params)
    assert ids_of(results) == expected
    chosen = engine.stats.chosen_drafts
    assert chosen[0] > 20
    assert sum(rounds for drafts, rounds in chosen.items() if drafts > 1) > 2
    assert {"accepted", "recovered"} <= {o for r in results for o in r.outputs[0].origins}


@pytest.mark.usefixtures("made_up_costs")
def test_auto_learns_nothing_from_the_request_of_the_start(tiny: Tiny) -> None:
    """Regression: six tokens of no request decided how requests began to draft."""
    engine = start(soft(tiny), speculate="auto")
    assert engine.policy is not None
    before = engine.policy.rates.overall.priors(8)
    engine.generate([[0, 0]], greedy(6))
    assert engine.policy.rates.overall.priors(8) != before
    engine.warm_up()
    assert engine.policy.rates.overall.priors(8) == before
    assert engine.policy.reason == "" and engine.stats == EngineStats()


@pytest.mark.parametrize("modules", [1, 3])
def test_a_head_that_had_to_wait_drafts_as_one_that_never_did(modules: int, tiny: Tiny) -> None:
    """K is 0 for a while, prompts and answers alike: what follows is drafted from full memory."""
    changes = {"num_nextn_predict_layers": modules} if modules > 1 else {}
    folder = checkpoint(tiny, **changes)
    drafted: list[dict[tuple[str, int], list[int]]] = []
    for pauses in (False, True):
        engine = start(folder, speculate=3)
        seen: dict[tuple[str, int], list[int]] = {}
        assert engine.loop.drafter is not None and engine.policy is not None
        choose, propose = engine.policy.choose, engine.loop.drafter.propose

        def pause(requests: Any, num_running: int, choose: Any = choose, on: bool = pauses) -> Any:
            chosen = choose(requests, num_running)
            return {r: 0 if on and 2 < r.num_output < 14 else k for r, k in chosen.items()}

        def watch(drafting: Any, propose: Any = propose, seen: Any = seen) -> None:
            propose(drafting)
            seen.update({(r.id, len(r.tokens)): list(r.drafts) for r in drafting})

        engine.policy.choose = pause
        engine.loop.drafter.propose = watch
        run(engine, make_prompts(), greedy(40))
        drafted.append(seen)
    steady, resumed = drafted
    both = steady.keys() & resumed.keys()
    assert len(both) > 30
    assert len(steady.keys() - resumed.keys()) > 10, "no request paused"
    assert not [key for key in both if resumed[key] != steady[key]]


def test_drafting_stops_while_too_many_requests_run(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=3, speculate_off_above=2)
    run(engine, [PROMPT] * 2, seeded(max_tokens=12))
    assert sum(engine.stats.acceptance.drafted) > 0
    before = list(engine.stats.acceptance.drafted)
    for seed in range(4):
        engine.add(PROMPT, seeded(seed=seed, max_tokens=12))
    while len(engine.scheduler.running) != 0 or engine.scheduler.waiting:
        engine.step()
        if len(engine.scheduler.running) == 4:
            assert engine.stats.acceptance.drafted == before
            assert "speculate_off_above 2" in engine.stats.draft_reason


def test_prompts_that_are_being_read_count_as_running(tiny: Tiny) -> None:
    """Regression: a long prompt in chunks did not count, and drafting went on above the limit."""
    engine = start(soft(tiny), speculate=3, speculate_off_above=1, max_batched_tokens=8)
    engine.add([5, 6], seeded(max_tokens=60))
    engine.step()
    engine.add([9] * 60, seeded(max_tokens=4))
    engine.step()
    before = sum(engine.stats.acceptance.drafted)
    for _ in range(4):
        engine.step()
        assert len(engine.scheduler.running) == 2
    assert sum(engine.stats.acceptance.drafted) <= before + 3, "drafts of the step before"
    assert "speculate_off_above 1" in engine.stats.draft_reason


@pytest.mark.parametrize("size", [4, 16])
def test_auto_starts_with_little_memory_and_short_texts(size: int, tiny: Tiny) -> None:
    """Regression: profiling used more slots and positions than there were."""
    folder = soft(tiny)
    engine = start(folder, speculate="auto", slots=24, block_size=size, max_model_len=14)
    expected = run(start(folder, speculate=0, max_model_len=14), [[5, 6, 7]], seeded(max_tokens=9))
    assert ids_of(run(engine, [[5, 6, 7]], seeded(max_tokens=9))) == ids_of(expected)


@pytest.mark.parametrize("family", unless_long(["mimo_v2"], ["mimo_v2", "step3p5"]))
def test_profiling_heads_of_several_modules(family: str, tiny: Tiny) -> None:
    """Regression: a module of a parallel head needs the states of several slots."""
    engine = start(checkpoint(tiny, family), speculate="auto", slots=4000)
    assert engine.model.head is not None and engine.model.head.num_modules > 1
    assert len(run(engine, [PROMPT], seeded(max_tokens=12))[0].outputs[0].token_ids) == 12


def test_profiling_covers_batches_and_drafts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_BUDGET_SECONDS", 60)  # a busy machine covers less in its time
    monkeypatch.setattr(profile, "_BATCHES", (1, 2, 4))
    profiled: Engine = start(soft(tiny), speculate="auto", slots=4000, block_size=16)
    assert profiled.policy is not None
    costs: Any = profiled.policy._costs
    measured: RoundCosts = costs.table
    assert [batch for batch, _ in measured.verify] == [1, 2, 4]
    assert [drafts for drafts, _ in measured.verify[0][1]] == [0, 1, 2, 3, 5, 8, 12, 16]
    assert all(seconds > 0 for _, curve in measured.verify for _, seconds in curve)
    large = measured.verify[-1][0]
    assert measured.round_seconds(large, 3) > measured.round_seconds(1, 0)
    run(profiled, [PROMPT] * 3, seeded(max_tokens=12))
    assert "tokens/s" in profiled.stats.draft_reason
