"""Both acceptance rules on their own: counting, and how much they accept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.sampling_reference import chi_square
from torch import Tensor

from headstart.sampling import acceptance, noise
from headstart.sampling.acceptance import accept_mask, reject, residual


def spikes(*tokens: int) -> Tensor:
    return torch.eye(4)[list(tokens)].unsqueeze(0)


def test_rejection_recovers_from_the_residual_and_takes_the_bonus_row() -> None:
    drafts = torch.tensor([[1, 2]])
    both, first = torch.tensor([2]), torch.tensor([1])
    draft = spikes(1, 2)
    found = [
        reject(drafts, draft, target, limit, [7], [10])
        for target, limit in (
            (spikes(1, 2, 3), both),  # all accepted, bonus from the third row
            (spikes(1, 0, 3), both),  # the second is rejected
            (spikes(3, 2, 0), both),  # the first is
            (spikes(1, 2, 3), first),  # only one was drafted: the second row is the bonus row
        )
    ]
    assert [(int(a), int(b)) for a, b in found] == [(2, 3), (1, 0), (0, 3), (1, 2)]


def test_rejection_is_a_function_of_seed_and_position() -> None:
    target, draft, drafts = random_case(64)
    seeds = list(range(64))
    limits = torch.full((64,), 3)
    first = reject(drafts, draft, target, limits, seeds, [4] * 64)
    again = reject(drafts, draft, target, limits, torch.tensor(seeds), torch.full((64,), 4))
    alone = reject(drafts[9:10], draft[9:10], target[9:10], limits[:1], [9], [4])
    moved = reject(drafts, draft, target, limits, seeds, [5] * 64)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert (int(first[0][9]), int(first[1][9])) == (int(alone[0]), int(alone[1]))
    assert not torch.equal(first[1], moved[1])


def random_case(size: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    target = torch.randn(size, 4, 9, generator=draw).softmax(-1)
    draft = torch.randn(size, 3, 9, generator=draw).softmax(-1)
    return target, draft, torch.randint(0, 9, (size, 3), generator=draw)


def test_a_residual_that_rounding_has_emptied_falls_back_on_the_target() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0]])
    assert torch.equal(residual(target, torch.tensor([[0.6, 0.5, 0.0]])), target)
    assert residual(target, torch.tensor([[0.2, 0.8, 0.0]]))[0].tolist() == pytest.approx(
        [0.3, 0, 0]
    )


TARGET = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
DRAFT = torch.tensor([0.1, 0.25, 0.25, 0.1, 0.3], dtype=torch.float64)
COPIED = torch.tensor([0, 0, 1, 0, 0], dtype=torch.float64)  # it could be no other token


def first_tokens(count: int, draft: Tensor = DRAFT) -> Tensor:
    """The first token of `count` rounds with one draft each, by the rejection rule."""
    seeds = range(count)
    drafts = (draft.log() + noise.gumbel(seeds, [3] * count, torch.arange(5))).argmax(-1)
    accepted, following = reject(
        drafts.unsqueeze(-1), draft.expand(count, 1, -1), TARGET.expand(count, 2, -1),
        torch.ones(count, dtype=torch.int64), seeds, [3] * count,
    )  # fmt: skip
    return torch.where(accepted == 1, drafts, following).bincount(minlength=5)


@pytest.mark.parametrize("draft", [DRAFT, COPIED], ids=["of a head", "copied"])
def test_one_round_of_rejection_follows_the_target(draft: Tensor) -> None:
    statistic, bound = chi_square(first_tokens(60_000, draft), TARGET)
    assert statistic < bound


def _without_draft(ids: Tensor, draft: Tensor, target: Tensor, *place: Any) -> Tensor:
    return accept_mask(ids, torch.ones_like(draft), target, *place)


BROKEN: dict[str, tuple[object, str, object]] = {
    "residual is the target": (acceptance, "residual", lambda target, draft: target),
    "draft dropped from the test": (acceptance, "accept_mask", _without_draft),
    "the test sees the draft's noise": (noise, "ACCEPTANCE", noise.CHOICE),
    "the residual draw sees the draft's noise": (noise, "RESIDUAL", noise.CHOICE),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_the_chi_square_sees_a_broken_rule(
    broken: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    statistic, bound = chi_square(first_tokens(60_000), TARGET)
    assert statistic > bound


@pytest.mark.parametrize("blur", [0.3, 1.0, 2.0], ids=["near", "middling", "far"])
def test_shared_noise_accepts_between_its_bounds_and_rejection_at_the_upper_one(
    blur: float,
) -> None:
    """Between (1 - TV) / (1 + TV) and 1 - TV, measured; independent noise falls below."""
    draw = torch.Generator().manual_seed(8)
    target_logits = torch.randn(200, generator=draw, dtype=torch.float64)
    draft_logits = target_logits + torch.randn(200, generator=draw, dtype=torch.float64) * blur
    target, draft = target_logits.softmax(-1), draft_logits.softmax(-1)
    distance = float((target - draft).abs().sum()) / 2
    assert 0.05 < distance < 0.95

    count, tokens = 10_000, torch.arange(200)
    shared = noise.gumbel(range(count), [3] * count, tokens)
    drafts = (draft_logits + shared).argmax(-1)
    matched = float(((target_logits + shared).argmax(-1) == drafts).double().mean())
    slack = 4 * math.sqrt(0.25 / count)
    assert (1 - distance) / (1 + distance) - slack < matched < 1 - distance + slack

    other = noise.gumbel(range(count), [4] * count, tokens)
    by_chance = float(((target_logits + other).argmax(-1) == drafts).double().mean())
    assert by_chance < (1 - distance) / (1 + distance) - slack, "the bound shows nothing"

    kept = accept_mask(
        drafts.unsqueeze(-1), draft.expand(count, 1, -1), target.expand(count, 2, -1),
        range(count), [3] * count,
    )  # fmt: skip
    assert float(kept.double().mean()) == pytest.approx(1 - distance, abs=slack)
