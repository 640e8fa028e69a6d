"""Formulas against sampling: each is the rate at which the real rule accepts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.models.documents import Documents
from headstart.sampling.acceptance import reject
from headstart.sampling.choose import choose, choose_drafts, draft_probs, target_probs
from headstart.sampling.params import Row, SamplingParams
from headstart.simulate.answers import Answer, Batch
from headstart.simulate.expected import Expected, expectations
from headstart.simulate.matches import DraftLogits
from headstart.simulate.rates import formula_rates

VOCAB, DRAWS = 7, 6000
PARAMS = SamplingParams(temperature=0.8, top_k=6)
IDS = torch.tensor([0, 1, 2, 4, 5, 6])  # of a draft vocabulary


def logits() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    target = 1.5 * torch.randn(VOCAB, generator=draw, dtype=torch.float64)
    return target, target + 0.8 * torch.randn(VOCAB, generator=draw, dtype=torch.float64)


def expected(
    tokens: Tensor,
    target: Tensor,
    draft: Tensor,
    *,
    own: bool = True,
    params: SamplingParams = PARAMS,
) -> list[Expected]:
    """One answer of two tokens for each of `tokens`, so that each is guessed once at depth 1."""
    count = len(tokens)
    ids = torch.stack([torch.zeros(count, dtype=torch.int64)] * 2 + [tokens], 1).flatten()
    documents = Documents((3,) * count)
    answers = [
        Answer(record_id=str(i), prompt_id=str(i), document=i, start=1, stop=3, params=params)
        for i in range(count)
    ]
    batch = Batch(torch.zeros(3 * count, 1), ids, documents, answers)
    return expectations(
        [torch.zeros(3 * count, 1)], batch, answers,
        DraftLogits(lambda states: draft[IDS].expand(len(states), -1), IDS),
        lambda states: target.expand(len(states), -1), is_own_text=own,
    )  # fmt: skip


def sampled(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """What target and draft choose with the same noise, many times."""
    rows = [Row(PARAMS, seed=seed, position=3) for seed in range(DRAWS)]
    chosen = choose(target.expand(DRAWS, -1), rows)
    return chosen, choose_drafts(draft[IDS].expand(DRAWS, -1), rows, IDS)


def test_shared_noise_given_the_text_is_the_rate_of_equal_choices() -> None:
    target, draft = logits()
    chosen, drafted = sampled(target, draft)
    for token in chosen.unique().tolist():
        (found,) = expected(torch.tensor([token]), target, draft)
        mine = chosen == token
        rate = float((drafted[mine] == token).double().mean())
        error = 4 * (0.25 / int(mine.sum())) ** 0.5
        assert float(found.accepted[2, 0]) == pytest.approx(rate, abs=error)


def test_averages_over_the_targets_own_text_are_the_rates_of_the_rules() -> None:
    target, draft = logits()
    chosen, drafted = sampled(target, draft)
    found = formula_rates(expected(chosen[:500], target, draft))
    equal = float((chosen == drafted).double().mean())
    assert found["shared_noise"].conditional[0] == pytest.approx(equal, abs=0.05)
    rows = [Row(PARAMS, seed=seed, position=3) for seed in range(DRAWS)]
    p = target_probs(target.expand(DRAWS, -1), rows)
    q = draft_probs(draft[IDS].expand(DRAWS, -1), rows, IDS, VOCAB)
    accepted, _ = reject(
        drafted[:, None], q[:, None], p[:, None].expand(-1, 2, -1), torch.ones(DRAWS).long(),
        list(range(DRAWS)), [3] * DRAWS,
    )  # fmt: skip
    assert found["rejection"].conditional[0] == pytest.approx(
        float(accepted.double().mean()), abs=0.03
    )
    best = int(q[0].argmax())
    assert found["greedy_drafts"].conditional[0] == pytest.approx(float(p[0, best]))
    assert found["rejection"].conditional[0] > found["shared_noise"].conditional[0]
    # Of a text that was sampled otherwise there is only the lower bound.
    bound = formula_rates(expected(chosen[:9], target, draft, own=False))["shared_noise"]
    overlap = found["rejection"].conditional[0]
    assert bound.conditional[0] == pytest.approx(overlap / (2 - overlap))
    assert bound.conditional[0] <= equal + 0.02


def test_penalties_are_the_targets_alone() -> None:
    target, draft = logits()
    draft[0] = target[0] = 5.0
    params = SamplingParams(temperature=1, presence_penalty=2)
    (found,) = expected(torch.tensor([4]), target, draft, params=params)
    penalised = target.clone()
    penalised[0] -= 2  # the output so far is token 0
    assert int(draft[IDS].argmax()) == 0
    assert float(found.accepted[1, 0]) == pytest.approx(float(penalised.softmax(-1)[0]))


def test_deeper_rates_count_rows_by_how_likely_their_drafts_were_accepted() -> None:
    """Depth 2 of a chain in which each depth has its own rate, against decoding by rejection."""
    target, draft = logits()
    other = target.flip(0)
    shape = Documents((4,))
    answer = Answer(record_id="a", prompt_id="a", start=1, stop=4, params=PARAMS)
    sums = []
    rows = [Row(PARAMS, seed=s, position=p) for s in range(300) for p in (2, 3)]
    text = choose(target.expand(600, -1), rows).view(300, 2)
    for tokens in text:
        ids = torch.cat([torch.tensor([0, 0]), tokens])
        batch = Batch(torch.zeros(4, 1), ids, shape, [answer])
        # The state says which depth it is, so that each depth drafts from its own distribution.
        depths = [torch.full((4, 1), float(depth)) for depth in (1, 2)]
        by_depth = DraftLogits(lambda states: torch.where(states[:, :1] == 1, draft, other))
        sums += expectations(
            depths, batch, [answer], by_depth, lambda states: target.expand(len(states), -1),
            is_own_text=True,
        )  # fmt: skip
    found = formula_rates(sums)["rejection"]
    p, first, second = (
        target_probs(each[None], [Row(PARAMS, 0, 0)])[0] for each in (target, draft, other)
    )
    assert found.conditional[0] == pytest.approx(float(torch.minimum(p, first).sum()))
    assert found.conditional[1] == pytest.approx(float(torch.minimum(p, second).sum()))
    assert found.lengths[2] == pytest.approx(1 + found.conditional[0] * (1 + found.conditional[1]))
    # Of two guessed tokens one can be the second: its weight is the chance that the first held.
    weight = sum(float(each.weight[0, 1]) for each in sums) / len(sums)
    assert weight == pytest.approx(found.conditional[0], abs=0.06)
