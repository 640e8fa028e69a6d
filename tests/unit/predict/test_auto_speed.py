"""What `auto` would bring does not depend on how many answers there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch

from headstart.predict import auto_speed
from headstart.predict.auto_speed import Speed, copying_speed, head_speed
from headstart.simulate.answers import Answer
from headstart.simulate.cost import CostTable
from headstart.simulate.matches import Matches

COSTS = CostTable(trunk=1.0, draft=0.1)


def answer(tokens: int, *, name: str = "a", is_right: bool = True) -> Matches:
    made = Answer(record_id=name, prompt_id=name, start=3, stop=3 + tokens)
    return Matches(made, torch.full((tokens - 1, 3), is_right))


def speed(answers: Sequence[Matches], requests: int) -> float | None:
    found = head_speed(answers, COSTS, requests, 3).of(answers)
    return None if found is None else found.speed_up


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_few_answers_fill_the_batch(number: int) -> None:
    found = speed([answer(200)] * number, 4)
    assert found == pytest.approx(4 / 1.3, rel=0.1), "four tokens a round, which costs 1.3"


def test_answers_without_rounds_are_left_out() -> None:
    assert speed([answer(1)], 1) is None
    alone = speed([answer(200)], 1)
    assert speed([answer(1, name="b"), answer(200)], 1) == alone
    wrong = speed([answer(200, is_right=False)], 1)
    assert alone is not None and wrong is not None and wrong < 1.05 < alone


@pytest.mark.parametrize("requests", [1, 2])
def test_parts_are_played_together_and_counted_apart(requests: int) -> None:
    """What is learned of one answer is known in the next; their seconds are their own."""
    right = [answer(100, name=f"right {i}") for i in range(2)]
    wrong = [answer(100, name=f"wrong {i}", is_right=False) for i in range(2)]
    played = head_speed([*right, *wrong], COSTS, requests, 3)
    good, bad, both = map(played.of, (right, wrong, [*right, *wrong]))
    assert good is not None and bad is not None and both is not None
    assert bad.speed_up < 1 < both.speed_up < good.speed_up, "drafts are tried on answers to come"
    assert played.of([answer(100, name="another")]) is None


def test_deciding_takes_time_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the clock before and after: deciding takes 0.5, a round without drafts 1."""
    looks = count()
    monkeypatch.setattr(auto_speed.time, "perf_counter", lambda: 0.5 * next(looks))
    wrong = [answer(200, is_right=False)]
    without = head_speed(wrong, COSTS, 1, 3).of(wrong)
    found = head_speed(wrong, COSTS, 1, 3, counts_deciding=True).of(wrong)
    assert without is not None and found is not None
    assert 1 / found.speed_up == pytest.approx(1 / without.speed_up + 0.5)


FREE_ROWS = ((0, 1.0), (16, 1.0))  # verifying copies costs nothing more


def copies_of(repeats: bool, *, with_head: bool, is_right: bool, verify: Any = FREE_ROWS) -> Speed:
    """Of an answer of 200 tokens that repeats its prompt, or has nothing in common with it."""
    prompt, other = [*range(200)], [*range(200, 400)]
    made = Answer(record_id="a", prompt_id="a", start=200, stop=400)
    matches = Matches(made, torch.full((199, 3), is_right))
    texts = {"a": [*prompt, *(prompt if repeats else other)]}
    played = copying_speed([matches], texts, COSTS, verify, 1, 3, with_head=with_head)
    found = played.of([matches])
    assert found is not None
    return found


@pytest.mark.parametrize("with_head", [False, True])
def test_an_answer_that_repeats_its_prompt_is_copied(with_head: bool) -> None:
    """Two rounds until three tokens agree, then 17 tokens in each; a round costs 1."""
    found = copies_of(True, with_head=with_head, is_right=False)
    assert found.speed_up == pytest.approx(199 / 14, rel=0.15)
    assert found.copied_share == pytest.approx(185 / 199, rel=0.05)
    beside = copies_of(True, with_head=True, is_right=True)
    assert beside.speed_up > 13 and beside.copied_share > 0.85, "copies are faster than the head"


def test_an_answer_that_repeats_nothing_is_not_copied() -> None:
    alone = copies_of(False, with_head=False, is_right=True)
    assert alone.copied_share == 0 and alone.speed_up == pytest.approx(1, rel=0.01)
    beside = copies_of(False, with_head=True, is_right=True)
    assert beside.copied_share == 0 and beside.speed_up == pytest.approx(4 / 1.3, rel=0.1)


def test_copies_are_not_taken_where_rows_cost_too_much() -> None:
    dear = ((0, 1.0), (1, 3.0), (16, 33.0))
    found = copies_of(True, with_head=False, is_right=False, verify=dear)
    assert found.copied_share == 0 and found.speed_up == pytest.approx(1, rel=0.01)
