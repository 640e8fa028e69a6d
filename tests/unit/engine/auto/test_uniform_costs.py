"""What captured rounds cost, and which K pays for all of their requests."""

from __future__ import annotations

import pytest

from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.live_costs import LiveCosts

TABLE = RoundCosts(
    verify=((1, ((0, 4.0), (1, 5.0), (3, 6.0))), (16, ((0, 6.0), (1, 8.0), (3, 14.0)))),
    context=((1, ((0, 0.001), (3, 0.002))), (16, ((0, 0.001), (3, 0.001)))),
    catch_up=((1, 0.16), (16, 0.32)), window=16,
)  # fmt: skip


def uniform() -> LiveCosts:
    return LiveCosts(TABLE, uniform=True)


@pytest.mark.parametrize(
    ("batch", "drafts", "context", "seconds"),
    [(1, 0, 0, 4.0), (1, 2, 0, 5.5), (16, 3, 0, 14.0), (1, 3, 1000, 8.0), (16, 1, 2000, 10.0)],
    ids=["point", "between drafts", "another size", "long context", "context of all requests"],
)
def test_a_round_costs_what_its_neighbours_and_its_context_say(
    batch: int, drafts: int, context: int, seconds: float
) -> None:
    assert TABLE.round_seconds(batch, drafts, context) == pytest.approx(seconds)


def test_rounds_without_drafts_pay_for_the_catching_up_that_they_cause() -> None:
    costs = uniform()
    assert costs.seconds(16, 0, context=0) == pytest.approx(6.02)
    assert costs.seconds(16, 1, context=0) == pytest.approx(8.0)


def test_the_cost_is_that_of_the_captured_size() -> None:
    assert LiveCosts(TABLE, uniform=True, captured_size=lambda count: 16).seconds(
        9, 1, 0
    ) == pytest.approx(8.0)


def test_all_requests_draft_what_the_round_does() -> None:
    """The second request promises little; its share of the round is paid for by the first."""
    choice = uniform().best([[0.9, 0.8, 0.7], [0.1]], [], context=0)
    assert choice.drafts == [3, 3]
    assert choice.speed > choice.plain_speed


def test_one_k_for_the_round_may_be_none() -> None:
    choice = uniform().best([[0.9, 0.8, 0.7], *[[0.05]] * 15], [], context=0)
    assert choice.drafts == [0] * 16
    assert choice.break_even == pytest.approx(8.0 / 6.02 - 1)


@pytest.mark.parametrize(("gain", "drafts"), [(0.70, 3), (0.60, 1)], ids=["little", "much"])
def test_a_k_stays_where_another_is_worth_little_more(gain: float, drafts: int) -> None:
    """Three drafts in 14 s give as much as one in 8 where the others promise 0.7125 each."""
    costs = uniform()
    assert costs.best([[0.9, 0.8, 0.8]] * 16, [], context=0).drafts[0] == 3
    promise = [0.9, gain, gain]
    assert uniform().best([promise] * 16, [], context=0).drafts[0] == 1
    assert costs.best([promise] * 16, [], context=0).drafts[0] == drafts
    assert costs.best([promise] * 16, [], context=0).drafts[0] == drafts


def test_no_k_stays_where_others_draft_as_much_anyway() -> None:
    """Regression: two per cent of a large batch were more than one request could promise."""
    costs, fixed = uniform(), [[0.5, 0.4, 0.3]] * 15
    assert costs.best([[0.0]], fixed, context=0).drafts == [0]
    assert costs.best([[0.3, 0.2, 0.1]], fixed, context=0).drafts == [3]


def test_beside_a_request_with_a_fixed_number_drafts_cost_nothing_more() -> None:
    own = [[0.1, 0.01, 0.001]]
    assert uniform().best(own, [], context=0).drafts == [0]
    assert uniform().best(own, [[0.5, 0.4, 0.3]], context=0).drafts == [3]


def test_long_contexts_make_drafts_more_attractive() -> None:
    promises = [[0.25]] * 16
    assert uniform().best(promises, [], context=16 * 50).drafts[0] == 0
    assert uniform().best(promises, [], context=16 * 500).drafts[0] == 1


def test_live_rounds_overrule_the_profile_and_only_where_they_differ() -> None:
    costs = uniform()
    for _ in range(30):
        costs.observe_verify(16, 16 * 4, 7.0)  # half of what was profiled
        costs.observe_verify(16, 16, 6.0)
    assert costs.seconds(16, 3, 0) == pytest.approx(7.0, rel=0.05)
    assert costs.seconds(16, 0, 0) == pytest.approx(6.02, rel=0.05)
    promises = [[0.5, 0.4, 0.3]] * 16
    assert costs.best(promises, [], 0).drafts[0] == 3
    assert uniform().best(promises, [], 0).drafts[0] == 1
