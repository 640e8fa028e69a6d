"""What `auto` would bring does not depend on how many answers there are."""

from __future__ import annotations

import pytest
import torch

from headstart.predict.auto_speed import auto_speed
from headstart.simulate.answers import Answer
from headstart.simulate.cost import CostTable
from headstart.simulate.matches import Matches

COSTS = CostTable(trunk=1.0, draft=0.1)


def answer(tokens: int, *, is_right: bool = True) -> Matches:
    made = Answer(record_id="a", prompt_id="a", start=3, stop=3 + tokens)
    return Matches(made, torch.full((tokens - 1, 3), is_right))


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_few_answers_fill_the_batch(count: int) -> None:
    found = auto_speed([answer(200)] * count, COSTS, 4, 3)
    assert found == pytest.approx(4 / 1.3, rel=0.1), "four tokens a round, which costs 1.3"


def test_answers_without_rounds_are_left_out() -> None:
    assert auto_speed([answer(1)], COSTS, 1, 3) is None
    alone = auto_speed([answer(200)], COSTS, 1, 3)
    assert auto_speed([answer(1), answer(200)], COSTS, 1, 3) == alone
    wrong = auto_speed([answer(200, is_right=False)], COSTS, 1, 3)
    assert alone is not None and wrong is not None and wrong < 1.05 < alone
