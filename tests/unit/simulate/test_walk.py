"""Rounds walked over known matches, the names of the rates, and intervals."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.data.records import Record
from headstart.errors import ConfigError, DataError
from headstart.sampling.params import SamplingParams
from headstart.simulate.answers import NO_LIMIT, Answer, answers_of, grouped, params_of
from headstart.simulate.matches import Matches, every_row, walk
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import intervals, rates


def matches(rows: list[list[int]], *, limit: int = NO_LIMIT, prompt: str = "p") -> Matches:
    answer = Answer(record_id="r", prompt_id=prompt, start=3, stop=3 + len(rows) + 1, limit=limit)
    return Matches(
        answer, torch.tensor(rows, dtype=torch.bool).view(len(rows), len(rows[0]) if rows else 4)
    )


def test_a_walk_jumps_over_what_was_accepted() -> None:
    # a_0 .. a_5; from a_0 two drafts are right, from a_3 none, from a_4 one, which is the end.
    found = matches([[1, 1, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0], [1, 0, 0]])
    counters = walk(found, 3)
    assert (counters.rounds, counters.drafted, counters.accepted) == (3, [3, 3, 3], [2, 1, 0])
    assert walk(found, 1).accepted == [2]  # a_0 to a_2, and a_4 to the end
    plain = walk(found, 0)
    assert (plain.rounds, plain.drafted, plain.length) == (5, [], 1.0)


def test_a_round_near_the_limit_drafts_less() -> None:
    found = matches([[1, 1], [1, 1], [1, 1], [1, 0]], limit=5)
    counters = walk(found, 2)
    # a_0 with two drafts gives a_1 a_2 a_3; from a_3 there is room for one token: no draft.
    assert (counters.rounds, counters.drafted, counters.accepted) == (2, [1, 1], [1, 1])


def test_an_answer_of_one_token_has_no_rounds() -> None:
    assert walk(matches([]), 4).rounds == 0
    assert every_row(matches([])).rounds == 0


boards = st.lists(
    st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=1, max_size=12),
    min_size=1,
    max_size=5,
)


@given(boards)
def test_metric_names(rows: list[list[list[int]]]) -> None:
    """tau = 1 + sum of c_k, and products of conditional rates are the cumulative ones."""
    found = rates([matches(each, prompt=str(i)) for i, each in enumerate(rows)], 4)
    for acceptance in (*found.walked, found.rows):
        assert acceptance.length == pytest.approx(1 + sum(acceptance.per_round))
        products = list(accumulate(acceptance.conditional, mul))
        assert products == pytest.approx(acceptance.cumulative)
        # Without a limit every round drafts alike, and both ways to count are the same.
        assert acceptance.cumulative == pytest.approx(acceptance.per_round)
    assert found.row_lengths[4] == pytest.approx(found.rows.length)
    tokens = sum(len(each) for each in rows)
    for acceptance in found.walked:
        assert sum(acceptance.accepted) + acceptance.rounds >= tokens  # a bonus behind the end


def test_intervals_draw_whole_prompts_and_are_the_same_every_time() -> None:
    def mean(sums: Any) -> Any:
        return sums[:, :1] / sums[:, 1:]

    draw = np.random.default_rng(3)
    values = [[float(v), 1.0] for v in draw.normal(5, 1, 400)]
    (wide,) = intervals([i // 100 for i in range(400)], values, mean) or []
    (narrow,) = intervals(list(range(400)), values, mean) or []
    assert narrow == (intervals(list(range(400)), values, mean) or [])[0]
    assert narrow[0] < np.mean([v for v, _ in values]) < narrow[1]
    assert narrow[1] - narrow[0] == pytest.approx(2 * 1.96 / 20, rel=0.2)
    # Four copies of everything are no new prompts.
    (copied,) = intervals([i % 400 for i in range(1600)], values * 4, mean) or []
    assert copied == pytest.approx(narrow)
    assert wide != narrow
    assert intervals(["one"] * 3, values[:3], mean) is None


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "id": "r", "prompt_id": "p", "category": "", "turn": 0, "sample": 0,
        "ids": np.arange(9, dtype=np.int32), "mask": np.arange(9) >= 4, "seed": 5,
        "sampling": {"temperature": 0.6, "top_k": 20, "max_tokens": 64}, "exact_ids": True,
        "finish_reason": "stop", "num_prompt": 4,
    }  # fmt: skip
    return Record(**{**fields, **changes})


def answered(changed: Record) -> list[tuple[int, int, int]]:
    found = answers_of(changed, max_len=40, params=params_of(changed.sampling))
    return [(answer.start, answer.stop, answer.limit) for answer in found]


def test_answers_are_the_masked_spans_with_their_limits() -> None:
    assert answered(record()) == [(4, 9, 36)]  # the model's length comes before max_tokens
    assert answered(record(sampling={"max_tokens": 7})) == [(4, 9, 7)]
    assert answered(record(max_tokens=6)) == [(4, 9, 6)]  # as the engine had resolved it
    assert answered(record(finish_reason="length")) == [(4, 9, 5)]
    several = np.array([1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=bool)
    spans = [(1, 3, NO_LIMIT), (5, 7, NO_LIMIT), (8, 9, NO_LIMIT)]
    assert answered(record(mask=several, sampling={}, seed=None)) == spans


def test_batches_hold_every_record_within_the_budget() -> None:
    many = [record(id=str(i), ids=np.arange(n)) for i, n in enumerate([5, 30, 8, 2, 9])]
    batches = list(grouped(many, 16))
    assert sorted(r.id for batch in batches for r in batch) == ["0", "1", "2", "3", "4"]
    assert all(len(b) == 1 or sum(len(r.ids) for r in b) <= 16 for b in batches)


def test_the_plan_replays_only_what_the_engine_sampled_so() -> None:
    sampled, greedy = record(), record(sampling={"temperature": 0.0})
    assert make_plan([sampled], None, "match").method == "replay"
    assert make_plan([sampled], 0.6, "match").method == "replay"
    assert make_plan([greedy], None, "match").method == "replay"
    assert make_plan([greedy], 0.6, "match").method == "formula"
    assert make_plan([sampled], 0.0, "match").method == "formula"
    assert make_plan([sampled], None, "rejection").is_own_text
    assert not make_plan([sampled], 1.0, "rejection").is_own_text
    mixed = [sampled, replace(sampled, seed=None)]
    plan = make_plan(mixed, None, "match")
    assert plan.method == "formula" and plan.is_own_text and "1 of 2" in plan.reason
    imported = make_plan([record(sampling={}, seed=None)], None, "match")
    assert imported.method == "replay" and not imported.is_own_text
    assert "not known to be the model's own" in imported.reason
    with pytest.raises(ConfigError, match="--rule is 'best'"):
        make_plan([sampled], None, "best")
    with pytest.raises(DataError, match="sampled in several ways"):
        make_plan([sampled, greedy], None, "match")
    with pytest.raises(DataError, match="sampled with mirostat"):
        params_of({"mirostat": 2})
    assert params_of({"top_p": None, "temperature": 0.6}) == SamplingParams(temperature=0.6)
