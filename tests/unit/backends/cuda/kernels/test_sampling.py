"""Choices and log-probabilities of the GPU's kernels against the sampler; interpreted on a CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import pytest
import torch
from support.long_runs import unless_long
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.kernels import adjusting
from headstart.backends.cuda.kernels import logprobs as logprob_kernels
from headstart.backends.cuda.kernels import sampling as kernels
from headstart.backends.cuda.sampling import (
    SamplingNeeds,
    choose_rows,
    empty_settings,
    move_row,
    set_row,
    settings_of,
)
from headstart.sampling.choose import NOTHING_ALLOWED, choose, choose_drafts, logprobs
from headstart.sampling.params import Row, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 150
CASES = unless_long(24, 40)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and steps of a small vocabulary, as a large one has."""
    monkeypatch.setattr(adjusting, "TILE", 32)
    for module in (kernels, logprob_kernels):
        monkeypatch.setattr(module, "TILE", 32)
        monkeypatch.setattr(module, "STEP", 64)


def some_logits(rows: int, seed: int, *, vocab: int = VOCAB) -> Tensor:
    """Smooth ones, coarse ones with many equal values, and flat ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, vocab, generator=generator) * (0.5, 3, 8)[seed % 3]
    return (values.round() if seed % 4 == 1 else values).to(DEVICE)


def some_params(draw: random.Random, **given: Any) -> SamplingParams:
    """Any settings together with any others."""
    found: dict[str, Any] = {
        "temperature": draw.choice([0, 0.01, 0.6, 1, 2]),
        "top_k": draw.choice([0, 0, 1, 3, 20, 70, 1000]),
        "top_p": draw.choice([1, 1, 0.95, 0.5, 0.1]),
        "min_p": draw.choice([0, 0, 0.1, 0.5]),
        "repetition_penalty": draw.choice([1, 1.3, 0.7]),
        "presence_penalty": draw.choice([0, 0, 0.5, -1]),
        "frequency_penalty": draw.choice([0, 0, 0.4]),
        "min_tokens": draw.choice([0, 5]),
    }
    if draw.random() < 0.3:
        found["logit_bias"] = {draw.randrange(VOCAB): draw.uniform(-5, 5) for _ in range(3)}
    if draw.random() < 0.2:
        found["banned_token_ids"] = tuple(draw.sample(range(VOCAB), 2))
    if draw.random() < 0.2:
        found["allowed_token_ids"] = (1, *draw.sample(range(VOCAB), 5))
        found["banned_token_ids"] = ()
    return SamplingParams(**{**found, **given})


def some_row(draw: random.Random, **given: Any) -> Row:
    outputs = [draw.randrange(VOCAB) for _ in range(draw.randrange(9))]
    mask = None
    if draw.random() < 0.3:
        mask = torch.tensor([draw.random() < 0.5 for _ in range(VOCAB)])
    return Row(
        some_params(draw, **given), draw.getrandbits(64), 10 + len(outputs),
        [draw.randrange(VOCAB) for _ in range(10)], outputs, len(outputs),
        frozenset(draw.sample(range(VOCAB), 2)), mask,
    )  # fmt: skip


@pytest.mark.parametrize("seed", unless_long(range(1, 3), range(4)))
def test_any_settings_together_choose_as_the_sampler(seed: int) -> None:
    draw = random.Random(seed)
    logits, rows = some_logits(CASES, seed), [some_row(draw) for _ in range(CASES)]
    wanted = choose(logits.cpu(), rows).tolist()
    assert choose_rows(logits, rows).tokens.tolist() == wanted
    assert len(set(wanted)) > CASES // 3


def test_a_row_is_chosen_alike_beside_any_others() -> None:
    draw = random.Random(9)
    logits, rows = some_logits(8, 9), [some_row(draw, temperature=1.5) for _ in range(8)]
    together = choose_rows(logits, rows).tokens.tolist()
    alone = [choose_rows(logits[i : i + 1], rows[i : i + 1]).tokens.item() for i in range(8)]
    assert together == alone


def test_drafts_are_chosen_without_penalties_among_a_draft_vocabulary() -> None:
    draw = random.Random(3)
    ids = torch.arange(0, VOCAB, 2, device=DEVICE)
    logits = some_logits(CASES, 3, vocab=len(ids))
    rows = [replace(some_row(draw), mask=None) for _ in range(CASES)]
    settings = settings_of(rows, VOCAB, logits.device)
    positions = torch.tensor([row.position for row in rows], device=DEVICE)
    adjusted = adjusting.adjust(logits[None], settings, positions, token_ids=ids, penalises=False)
    found = ids[kernels.draw(adjusted, settings).clamp_min(0)]
    wanted = choose_drafts(logits.cpu(), rows, ids.cpu())
    allowed = [i for i, row in enumerate(rows) if row.params.allowed_token_ids is None]
    assert [found[i].item() for i in allowed] == [wanted[i].item() for i in allowed]


def test_no_token_is_chosen_where_none_is_allowed() -> None:
    row = Row(SamplingParams(temperature=0.5), 1, 4, mask=torch.zeros(VOCAB, dtype=torch.bool))
    greedy = replace(row, params=SamplingParams(temperature=0))
    found = choose_rows(some_logits(2, 0), [row, greedy]).tokens
    assert found.tolist() == [NOTHING_ALLOWED] * 2


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_logits_that_are_no_numbers_choose_a_token_all_the_same() -> None:
    logits = torch.full((3, VOCAB), torch.nan, device=DEVICE)
    settings = [{"temperature": 0}, {"top_k": 5}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}]
    rows = [Row(SamplingParams(**own), 1, 1) for own in settings]
    assert all(0 <= token < VOCAB for token in choose_rows(logits, rows).tokens.tolist())


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_the_samplers(mode: str) -> None:
    draw = random.Random(5)
    logits = some_logits(CASES, 4)
    rows = [
        some_row(draw, logprobs=draw.choice([None, 0, 3, 20]), logprobs_mode=mode)
        for _ in range(CASES)
    ]
    found = choose_rows(logits, rows, with_logprobs=True)
    assert found.logprobs is not None
    values, ids = (part.cpu() for part in found.logprobs)
    num_compared = 0
    for i, row in enumerate(rows):
        top = row.params.logprobs
        if top is None or found.tokens[i] == NOTHING_ALLOWED:
            continue
        own = found.tokens[i : i + 1].cpu()
        wanted = logprobs(logits[i : i + 1].cpu(), own, top, row.params.logprobs_mode, [row])
        torch.testing.assert_close(values[i, :1], wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values[i, 1 : 1 + top], wanted[2][0], rtol=1e-4, atol=1e-4)
        is_real = wanted[2][0] > -torch.inf
        assert ids[i, :top][is_real].tolist() == wanted[1][0][is_real].tolist()
        num_compared += 1
    assert num_compared > CASES // 2


def test_numbers_beyond_32_bits_mean_what_they_say() -> None:
    """Regression: one request with such a top_k made the step of all others fail."""
    huge = SamplingParams(temperature=1, top_k=1 << 40, min_tokens=1 << 40)
    usual = SamplingParams(temperature=1, min_tokens=50)
    rows = [Row(params, 3, 4, end_ids=frozenset({1})) for params in (huge, usual)]
    logits = some_logits(1, 8).repeat(2, 1)
    assert len(set(choose_rows(logits, rows).tokens.tolist())) == 1


def test_a_vocabulary_has_fewer_tokens_than_alternatives_are_asked_for() -> None:
    row = Row(SamplingParams(temperature=0, logprobs=20), 1, 1)
    logits = some_logits(1, 3, vocab=7)
    found = choose_rows(logits, [row], with_logprobs=True)
    assert found.logprobs is not None
    values, ids = found.logprobs
    assert sorted(ids[0, :7].tolist()) == list(range(7))
    told = logits.log_softmax(-1)[0][ids[0, :7].long()]
    torch.testing.assert_close(values[0, 1:8].cpu(), told.cpu(), rtol=1e-4, atol=1e-4)


def test_rows_behind_drafts_count_them_as_output() -> None:
    params = SamplingParams(
        temperature=0, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3
    )
    logits, drafts = some_logits(6, 6), torch.tensor([[5, 5], [7, 9]], device=DEVICE)
    requests = [Row(params, 1, 4, [3], [8, 5], 2), Row(params, 2, 6, [7], [], 0)]
    settings = settings_of(requests, VOCAB, logits.device)
    positions = torch.tensor([4, 5, 6, 6, 7, 8], device=DEVICE)
    # Large where they are drafts: a count that is missing is seen.
    logits[:, [5, 7, 9]] += 6
    adjusted = adjusting.adjust(logits[None], settings, positions, drafts=drafts)
    rows = [
        replace(own, output_ids=[*own.output_ids, *drafts[i, :depth].tolist()])
        for i, own in enumerate(requests)
        for depth in range(3)
    ]
    assert kernels.draw(adjusted, settings).tolist() == choose(logits.cpu(), rows).tolist()


def test_history_follows_what_rounds_emit_and_a_request_that_moves() -> None:
    params = SamplingParams(frequency_penalty=0.5, temperature=0)
    settings = empty_settings(3, VOCAB, torch.device(DEVICE))
    row = Row(params, 1, 4, [3, 3, 9], [8, 5, 5], 3)
    set_row(settings, 2, row, torch.tensor(8, device=DEVICE))
    set_row(settings, 0, Row(SamplingParams(), 5, 4))
    emitted = torch.tensor([[2, 1, 1, 0], [0, 4, 4, 4], [2, 5, 7, 6]], device=DEVICE)
    adjusting.remember(settings, emitted)
    move_row(settings, 2, 1)
    words = settings.history[1]
    counts = {at: int(words[at]) >> 2 for at in words.nonzero().flatten().tolist()}
    assert {at: n for at, n in counts.items() if n} == {5: 3, 7: 1, 8: 2}
    assert [int(words[at]) & adjusting.IN_PROMPT for at in (3, 9, 5)] == [1, 1, 0]
    assert settings.history[0].count_nonzero() == 0, "requests without penalties keep none"
    assert settings.seeds.tolist() == [5, 1, 1]


def test_a_round_processes_what_one_of_its_requests_needs() -> None:
    def needs(*settings: dict[str, Any]) -> tuple[bool, bool, bool]:
        each = [SamplingNeeds.of(SamplingParams(**own)) for own in settings]
        found = reduce(or_, each, SamplingNeeds())
        return found.processes, found.processes_drafts, found.has_logprobs

    assert needs() == needs({}, {"temperature": 0, "top_p": 0.5}) == (False, False, False)
    assert needs({}, {"top_p": 0.5}) == (True, True, False)
    assert needs({"frequency_penalty": 1}) == (True, False, False)
    assert needs({"logprobs": 0}, {"min_tokens": 2}) == (True, True, True)
