"""The choice: exact, alone in its row, and the same by every fast path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.sampling import noise
from headstart.sampling.choose import (
    NOTHING_ALLOWED,
    choose,
    choose_drafts,
    draft_probs,
    logprobs,
    target_probs,
)
from headstart.sampling.params import Row, SamplingParams
from headstart.sampling.processors import process

SETTINGS: dict[str, dict[str, Any]] = {
    "plain greedy": {"temperature": 0},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.5, "min_tokens": 9},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 20},
    "top-k of 1": {"top_k": 1},
    "top-k of 1024": {"top_k": 1024},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "top-k and top-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "top_k": 40},
    "bias and masks": {"logit_bias": {3: 2.0}, "banned_token_ids": (5, 6), "top_p": 0.95},
    "allowed": {"allowed_token_ids": tuple(range(0, 400, 3))},
}


def some_logits(num_rows: int, num_tokens: int, dtype: torch.dtype, *, coarse: bool) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, num_tokens, generator=draw) * 3
    return (logits.bfloat16() if coarse else logits).to(dtype)


def make_rows(num_rows: int, **fields: Any) -> list[Row]:
    params = SamplingParams(**fields)
    return [
        Row(params, 1000 + i, 50 + i, [1, 2, 3], [4, 4, i % 7], 3, frozenset({0, 9}))
        for i in range(num_rows)
    ]


def choose_slowly(logits: Tensor, rows: list[Row]) -> Tensor:
    """The contract, word for word: no fast path."""
    values = process(logits, rows)
    for i, row in enumerate(rows):
        if not row.params.is_greedy:
            tokens = torch.arange(logits.shape[-1])
            values[i] += noise.gumbel([row.seed], [row.position], tokens)[0]
    best = values.amax(-1, keepdim=True)
    return torch.stack([(v == b).nonzero()[0, 0] for v, b in zip(values, best, strict=True)])


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "many ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS.keys())
def test_fast_paths_choose_what_the_full_computation_chooses(
    fields: dict[str, Any], dtype: torch.dtype, coarse: bool
) -> None:
    logits, rows = some_logits(40, 2000, dtype, coarse=coarse), make_rows(40, **fields)
    assert torch.equal(choose(logits, rows), choose_slowly(logits, rows))


@pytest.mark.usefixtures("two_threads")
def test_a_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    """At this size torch splits a sum over threads if, and only if, it has one row."""
    logits = some_logits(len(SETTINGS), 40_000, torch.float32, coarse=False)
    rows = [row for fields in SETTINGS.values() for row in make_rows(1, **fields)]
    logits *= 2  # so that top-p need not sort whole rows, which is slow
    together, processed = choose(logits, rows), process(logits, rows)
    for i, row in enumerate(rows):
        assert torch.equal(process(logits[i : i + 1], [row])[0], processed[i])
        assert choose(logits[i : i + 1], [row])[0] == together[i]


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 40_000)
    logits[1, [700, 39_999]] = 1
    logits[2, 31_007:] = 1
    assert choose(logits, make_rows(3, temperature=0)).tolist() == [0, 700, 31_007]
    masked = make_rows(3, temperature=0, banned_token_ids=(0, 700))
    assert choose(logits, masked).tolist() == [1, 39_999, 31_007]


def test_equal_sums_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are in order of value, so the larger value could win a tie of sums."""
    wanted = torch.tensor([1.0, 0.0, 3.0])
    monkeypatch.setattr(noise, "gumbel", lambda seeds, positions, ids: wanted[ids].view(1, -1))
    logits = torch.tensor([[2.0, 3.0, 0.0]])
    for fields in ({}, {"top_k": 2}, {"top_k": 3}, {"top_p": 0.999}):
        assert choose(logits, make_rows(1, **fields)).tolist() == [0], fields


def test_half_precision_logits_are_taken_as_fp32() -> None:
    logits = some_logits(20, 500, torch.bfloat16, coarse=True)
    for fields in SETTINGS.values():
        rows = make_rows(20, **fields)
        assert torch.equal(choose(logits, rows), choose(logits.float(), rows))


def test_a_row_in_which_nothing_is_allowed_says_so() -> None:
    mask = torch.zeros(6, dtype=torch.bool)
    for fields in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}):
        dead = Row(SamplingParams(**fields), 1, 2, mask=mask)
        live = Row(SamplingParams(**fields), 1, 2)
        found = choose(torch.ones(2, 6), [dead, live])
        assert found[0] == NOTHING_ALLOWED and found[1] >= 0
        assert choose_drafts(torch.ones(1, 6), [dead])[0] >= 0


def test_the_grammar_mask_is_obeyed_at_any_temperature() -> None:
    mask = torch.zeros(50, dtype=torch.bool)
    mask[[7, 8, 30]] = True
    for fields in ({"temperature": 0}, {}, {"top_k": 5}):
        rows = [Row(SamplingParams(**fields), i, 2, mask=mask) for i in range(40)]
        found = choose(some_logits(40, 50, torch.float32, coarse=False), rows)
        assert set(found.tolist()) <= {7, 8, 30}


WITHOUT_PENALTIES = {name: f for name, f in SETTINGS.items() if "penalties" not in name}


@pytest.mark.parametrize("fields", WITHOUT_PENALTIES.values(), ids=WITHOUT_PENALTIES.keys())
def test_a_draft_with_the_targets_logits_makes_the_targets_choice(fields: dict[str, Any]) -> None:
    logits = some_logits(30, 500, torch.float32, coarse=False)
    params, rows = SamplingParams(**fields), make_rows(30, **fields)
    chosen = choose(logits, rows)
    assert torch.equal(choose_drafts(logits, rows), chosen)
    # The same tokens in another order are the same draft vocabulary: noise goes by original id.
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    assert torch.equal(choose_drafts(logits[:, shuffled], rows, shuffled), chosen)
    by_column = shuffled[choose_drafts(logits[:, shuffled], rows)]
    if not params.is_greedy and params.top_k != 1:
        assert not torch.equal(by_column, chosen), "noise by column would have passed"


def test_a_draft_vocabulary_obeys_masks_by_original_id() -> None:
    token_ids = torch.tensor([90, 4, 50, 12])
    mask = torch.ones(100, dtype=torch.bool)
    mask[90] = False
    params = SamplingParams(temperature=0, banned_token_ids=(4, 99), logit_bias={12: 5.0, 1: 9.0})
    row = Row(params, 1, 2, mask=mask)
    logits = torch.tensor([[9.0, 8.0, 4.0, 0.0]])
    assert choose_drafts(logits, [row], token_ids).tolist() == [12]


def test_probabilities_are_those_that_are_drawn_from() -> None:
    logits = some_logits(3, 8, torch.float64, coarse=False)
    rows = [*make_rows(1, temperature=0), *make_rows(1, top_k=3), *make_rows(1)]
    probs = target_probs(logits, rows)
    assert probs.sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert probs[0].max() == 1 and probs[0].argmax() == choose(logits[:1], rows[:1])[0]
    assert (probs[1] > 0).sum() == 3
    assert torch.allclose(probs[2], logits[2].softmax(-1))
    token_ids = torch.tensor([20, 3, 11, 0, 5, 6, 7, 8])
    wide = draft_probs(logits, rows, token_ids, 30)
    assert wide.shape == (3, 30) and torch.equal(wide[:, token_ids], probs)


def test_log_probabilities_are_raw_unless_processed_ones_are_asked_for() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    rows = make_rows(1, temperature=0.5, top_k=2)
    chosen, ids, values = logprobs(logits, torch.tensor([2]), 3, "raw", rows)
    raw = logits.log_softmax(-1)[0]
    assert chosen.tolist() == [raw[2]] and ids.tolist() == [[1, 3, 2]]
    assert values.tolist() == [[raw[1], raw[3], raw[2]]]
    chosen, ids, values = logprobs(logits, torch.tensor([3]), 2, "processed", rows)
    assert chosen.tolist() == pytest.approx([math.log(0.5)]) and ids.tolist() == [[1, 3]]
    chosen, ids, values = logprobs(logits, torch.tensor([3]), 0, "raw", rows)
    assert chosen.shape == (1,) and ids.shape == (1, 0) and values.shape == (1, 0)


@pytest.mark.usefixtures("two_threads")
def test_the_operators_that_truncation_sums_with_go_row_by_row() -> None:
    """What truncation.py builds on: torch splits `sum` over threads when it has one long row."""
    logits = some_logits(5, 150_000, torch.float32, coarse=False)
    shares, totals = logits.softmax(-1), logits.softmax(-1).double().cumsum(-1)
    for i in range(5):
        assert torch.equal(logits[i : i + 1].softmax(-1)[0], shares[i])
        assert torch.equal(shares[i : i + 1].double().cumsum(-1)[0], totals[i])
    assert torch.equal(logits[:3].log_softmax(-1), logits.log_softmax(-1)[:3])
