"""When newcomers go without a head."""

from __future__ import annotations

import pytest

from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.headless import Headless
from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

TABLE = RoundCosts(((1, ((0, 4.0), (1, 5.0))), (16, ((0, 6.0), (1, 8.0)))), catch_up=((1, 0.2),))


def told(options: EngineOptions, worth: list[float | None]) -> Headless:
    """One that is told what drafts are worth."""
    own = Headless(options, DraftPolicy(options, None, max_len=100), lambda request: True)
    own.prospect = lambda batch, context: worth.pop(0)  # type: ignore[method-assign]
    return own


@pytest.mark.parametrize(
    ("prospects", "without"),
    [([0.995], False), ([0.98], True), ([0.98, 1.02], True), ([0.98, 1.04], False),
     ([0.98, 1.04, 0.995], False), ([0.98, None], False)],
    ids=["nearly pays", "does not", "nearly pays again", "pays again", "stays so", "forgotten"],
)  # fmt: skip
def test_a_decision_stands_until_it_is_clearly_wrong(
    prospects: list[float | None], without: bool
) -> None:
    own = told(EngineOptions(speculate="auto"), list(prospects))
    newcomer = Request("r", [1, 2], SamplingParams(), 0, 1, frozenset(), arrival=1)
    for _ in prospects:
        own.look([], [newcomer])
    assert own.goes_without(newcomer) is without


def test_drafts_are_compared_with_rounds_that_no_head_has_to_follow() -> None:
    options = EngineOptions(speculate="auto")
    policy = DraftPolicy(options, None, max_len=100)
    own = Headless(options, policy, lambda request: True)
    policy.uniform_costs = LiveCosts(TABLE, uniform=True)
    assert own.prospect(16, context=0) is None, "nothing was drafted yet"
    for number in range(2000):
        policy.rates.overall.observe(1, number % 2)
    assert own.prospect(16, context=0) == pytest.approx(1.5 * 6.0 / 8.0, rel=0.01)
