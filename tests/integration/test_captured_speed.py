"""Captured rounds are predicted as an engine runs them: by its policy, with copies a round late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.engine_records import records
from support.engine_runs import ids_of, run
from support.kernel_runs import BLOCK_BYTES, SIZES
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.squeezed import fit_drafts
from headstart.engine import core
from headstart.engine.auto.costs import NEVER_PAYS, Curve, RoundCosts
from headstart.engine.auto.served_costs import CapturedCosts
from headstart.engine.engine import Engine
from headstart.engine.options import MENU
from headstart.engine.output import Result
from headstart.engine.request import Request
from headstart.predict.captured_speed import _Drafts, _fitted, captured_speed
from headstart.sampling.params import SamplingParams
from headstart.simulate.matches import Matches
from headstart.simulate.plan import make_plan
from headstart.simulate.scoring import WHOLE, score

pytestmark = pytest.mark.usefixtures("quick_kernels")

TABLE = RoundCosts(
    tuple((size, tuple((k, 1.0 + 0.1 * k) for k in MENU)) for size in (1, 4)),
    catch_up=((1, 0.3),), window=15, passes=((8, 1.0), (12, 1.02), (64, 1.2)),
)  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.7, seed=1, dtype="F32", **SIZES)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """What the model would write, changed here and there, and its beginning again."""
    begins = unless_long([[9, 10, 11]], [[9, 10, 11], [5, 6], [17, 3, 8, 2]])
    plain = Engine(folder, dtype="float32", speculate=0, kernels="off", kv_bytes=200 * BLOCK_BYTES)
    said = ids_of(run(plain, begins, PARAMS))
    changed = [[(t + 1) % 64 if i % 9 == 8 else t for i, t in enumerate(own)] for own in said]
    return [[*begin, *own, *begin] for begin, own in zip(begins, changed, strict=True)]


def matches_of(engine: Engine, results: Sequence[Result]) -> list[tuple[Matches, list[int]]]:
    """Where the head was right in each answer, and the whole text."""
    made = records(results, PARAMS)
    found = score(engine.model, made, make_plan(made, None, "match"), max_drafts=8)
    by_name = {each.answer.record_id: each for each in found[WHOLE].overall.matches}
    return [(by_name[own.id], own.ids.tolist()) for own in made]


CASES = [("auto", TABLE.passes), ("context", ()), ("auto", ()), ("context", TABLE.passes)]


@pytest.mark.parametrize(("source", "passes"), unless_long(CASES[:2], CASES))
def test_rounds_are_those_of_an_engine(
    folder: Path, prompts: list[list[int]], source: Literal["auto", "context"], passes: Curve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(core, "profile_host_rounds", lambda *_, **__: (NEVER_PAYS, None))
    engine = Engine(
        folder, dtype="float32", block_size=4, kernels="on", speculate="auto",
        kv_bytes=400 * BLOCK_BYTES, max_running_requests=1,
    )  # fmt: skip
    table = replace(TABLE, passes=passes)
    assert engine.policy is not None
    engine.policy.use_rounds(table, lambda count: 1)
    results = list[Result]()
    for prompt in prompts:
        engine.policy.reset()  # a round that ran for nothing behind the last answer counted
        results += run(engine, [prompt], replace(PARAMS, draft_from=source))
    assert not engine.stats.slow_rounds and engine.stats.copied_accepted > 10
    kinds = set[str]()
    for result, (matches, text) in zip(results, matches_of(engine, results), strict=True):
        place = matches.answer.record_id, matches.answer.start
        costs, with_head = CapturedCosts(table, 1), source == "auto"
        played = captured_speed([matches], {place[0]: text}, costs, 1, 8, with_head=with_head)
        share, stats = played.shares[place], result.stats
        assert share.rounds == sum(stats.rounds.values())
        assert (share.tokens, share.copied) == (len(text) - place[1] - 1, stats.copied_accepted)
        kinds |= set(result.outputs[0].origins)
    assert ("accepted" in kinds) == (source == "auto")


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_cut_as_the_device_cuts_them(seed: int) -> None:
    numbers = random.Random(seed)
    totals = [numbers.choice([0, 1, 3, 8, 16]) for _ in range(9)]
    requests = [Request(str(i), [1], PARAMS, 0, 9, frozenset(), i) for i in range(len(totals))]
    for room in range(len(totals), sum(totals) + 12):
        drafts = {r: _Drafts(n, 0, 0) for r, n in zip(requests, totals, strict=True)}
        found = [own.total for own in _fitted(drafts, room).values()]
        limits = torch.tensor(totals, dtype=torch.int32)
        many = torch.full_like(limits, 99)
        fit_drafts(many, many, limits, most=16, rows=room)
        assert found == limits.tolist() and sum(found) + len(found) <= room
    assert [own.total for own in _fitted(drafts, None).values()] == totals
