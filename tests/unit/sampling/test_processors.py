"""Every processor against a plain reference, alone and together, and their order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sampling_reference import INF, reference_process

from headstart.sampling.params import SamplingParams
from headstart.sampling.processors import process
from headstart.sampling.rows import Row
from headstart.sampling.truncation import ranked

V = 11
TOKENS = st.integers(0, V - 1)
IDS = st.lists(TOKENS, max_size=6)

# Each processor alone; coarse logits, so that ties are common.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.5, 1.2, 3.0]),
    "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.7]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-3.0, 0.5, 100.0]), min_size=1),
    "allowed_token_ids": st.sets(TOKENS, min_size=1).map(tuple),
    "banned_token_ids": st.sets(TOKENS, min_size=1, max_size=5).map(tuple),
    "min_tokens": st.integers(1, 8),
    "temperature": st.sampled_from([0.0, 0.3, 0.7, 2.0]),
    "top_k": st.integers(-1, V + 3),
    "top_p": st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.95]),
    "min_p": st.sampled_from([0.02, 0.3, 1.0]),
}


@st.composite
def cases(draw: Any, names: list[str]) -> tuple[list[float], SamplingParams, dict[str, Any]]:
    logits = draw(st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=V, max_size=V))
    fields = {name: draw(FIELDS[name]) for name in names}
    allowed, banned = fields.get("allowed_token_ids"), fields.get("banned_token_ids")
    assume(allowed is None or set(allowed) - set(banned or ()))
    history = {"prompt": draw(IDS), "output": draw(IDS), "end_ids": draw(IDS)}
    mask = draw(st.none() | st.lists(st.booleans(), min_size=V, max_size=V))
    return logits, SamplingParams(**fields), {**history, "mask": mask}


def row(params: SamplingParams, history: dict[str, Any]) -> Row:
    mask = history["mask"]
    return Row(
        params, 1, 5, history["prompt"], history["output"], len(history["output"]),
        frozenset(history["end_ids"]), None if mask is None else torch.tensor(mask),
    )  # fmt: skip


def check(batch: list[tuple[list[float], SamplingParams, dict[str, Any]]]) -> None:
    """A batch of cases; those where top-p stands on the edge are not held against it."""
    logits = torch.tensor([case[0] for case in batch], dtype=torch.float64)
    before = logits.clone()
    found = process(logits, [row(params, history) for _, params, history in batch])
    assert torch.equal(logits, before), "the logits were changed in place"
    for (values, params, history), result in zip(batch, found, strict=True):
        expected, margin = reference_process(values, params, **history)
        if margin > 1e-9:
            assert result.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", FIELDS)
def test_a_processor_does_what_its_reference_does(name: str) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.lists(cases([name]), min_size=1, max_size=4))
    def run(batch: Any) -> None:
        check(batch)

    run()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(st.sets(st.sampled_from(sorted(FIELDS))).map(sorted).flatmap(cases), max_size=5))
def test_any_mix_of_processors_in_one_batch_does_what_the_reference_does(batch: Any) -> None:
    if batch:
        check(batch)


def one(logits: list[float], history: dict[str, Any] | None = None, **fields: Any) -> list[float]:
    history = {"prompt": (), "output": (), "end_ids": (), "mask": None} | (history or {})
    found: list[float] = process(
        torch.tensor([logits], dtype=torch.float64), [row(SamplingParams(**fields), history)]
    )[0].tolist()
    return found


def test_repetition_comes_before_presence() -> None:
    # (4 / 2) - 1, not (4 - 1) / 2.
    found = one([4.0, 0.0], {"output": [0]}, temperature=0, repetition_penalty=2,
                presence_penalty=1)  # fmt: skip
    assert found == [1, 0]


def test_penalties_come_before_bias() -> None:
    # 2 / 2 + 1, not (2 + 1) / 2.
    found = one([2.0, 0.0], {"output": [0]}, temperature=0, repetition_penalty=2,
                logit_bias={0: 1.0})  # fmt: skip
    assert found == [2, 0]


def test_a_bias_cannot_lift_a_banned_token() -> None:
    found = one([0.0, 0.0], temperature=0, logit_bias={0: 100.0}, banned_token_ids=(0,))
    assert found == [-INF, 0]


def test_masks_come_before_top_k() -> None:
    mask = [False, True, True, True]
    found = one([9.0, 3.0, 2.0, 1.0], {"mask": mask}, top_k=2, banned_token_ids=(1,))
    assert found == [-INF, -INF, 0, -1]


def test_temperature_comes_before_top_p() -> None:
    logits = [math.log(0.6), math.log(0.3), math.log(0.1)]
    assert one(logits, top_p=0.5)[1] == -INF
    assert one(logits, top_p=0.5, temperature=4.0)[1] > -INF


def test_top_k_comes_before_top_p() -> None:
    # Of all four, 0.4 + 0.3 reach 0.6; of the first two, 0.4 / 0.7 has not reached it either;
    # at 0.55 the first alone does, but only when shares are of what top-k left.
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert one(logits, top_p=0.55)[1] > -INF
    assert one(logits, top_p=0.55, top_k=2)[1] == -INF


def test_top_p_comes_before_min_p_and_min_p_is_of_the_most_likely() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert one(logits, min_p=0.5, top_p=0.99)[1] > -INF
    assert one(logits, min_p=0.5, top_p=0.99)[2] == -INF


def test_top_k_keeps_the_lowest_of_equal_ids() -> None:
    found = one([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3)
    assert [v > -INF for v in found] == [True, True, False, True, False]


def test_top_p_keeps_at_least_one_and_the_lowest_of_equal_ids() -> None:
    assert [v > -INF for v in one([0.0, 0.0, 0.0, 0.0], top_p=1e-9)] == [True] + [False] * 3
    assert [v > -INF for v in one([0.0, 0.0, 0.0, 0.0], top_p=0.5)] == [True] * 2 + [False] * 2


def test_a_row_without_any_allowed_token_is_minus_infinity_and_not_nan() -> None:
    mask = [False] * 3
    for fields in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}):
        assert one([1.0, 2.0, 3.0], {"mask": mask}, **fields) == [-INF] * 3


def test_min_tokens_holds_back_end_ids_until_the_count_is_reached() -> None:
    history = {"output": [1, 1], "end_ids": [2]}
    assert one([0.0, 0.0, 5.0], history, temperature=0, min_tokens=3)[2] == -INF
    assert one([0.0, 0.0, 5.0], history, temperature=0, min_tokens=2)[2] == 5


def test_a_long_nucleus_is_cut_as_a_full_sort_would() -> None:
    """top-p first looks at a prefix; flat rows need a longer one, and then the whole row."""
    draw = torch.Generator().manual_seed(3)
    scales = torch.tensor([[20.0], [3.0], [1.0], [0.01]], dtype=torch.float64)
    logits = torch.randn(4, 9000, generator=draw, dtype=torch.float64) * scales
    params = SamplingParams(top_p=0.9)
    found = process(logits, [Row(params, 1, 5)] * 4)
    shares, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    kept = shares.cumsum(-1) - shares < 0.9
    assert (kept.sum(-1) > torch.tensor([0, 256, 256, 4096])).all(), "every way should be taken"
    assert kept.sum(-1)[0] < 256
    expected = torch.zeros_like(kept).scatter(-1, order, kept)
    assert torch.equal(found > -INF, expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 30))
def test_ranking_is_by_value_then_by_lowest_id(numbers: list[int], count: int) -> None:
    count = min(count, len(numbers))
    values, ids = ranked(torch.tensor([numbers, numbers[::-1]], dtype=torch.float32), count)
    for row_numbers, row_ids, row_values in zip(
        (numbers, numbers[::-1]), ids.tolist(), values.tolist(), strict=True
    ):
        order = sorted(range(len(numbers)), key=lambda i: (-row_numbers[i], i))[:count]
        assert row_ids == order and row_values == [row_numbers[i] for i in order]
