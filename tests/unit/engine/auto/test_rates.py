"""How acceptance is estimated, by depth."""

from __future__ import annotations

import pytest

from headstart.engine.auto.rates import Rates


def seen(*rounds: tuple[int, int]) -> Rates:
    rates = Rates()
    for drafts, accepted in rounds:
        rates.observe(drafts, accepted)
    return rates


def test_a_depth_counts_only_where_the_one_before_was_right() -> None:
    rates = seen((3, 0), (3, 1), (3, 3))
    assert [round(count) for count in rates.tried] == [3, 2, 1]
    assert [round(count) for count in rates.right] == [2, 1, 1]


@pytest.mark.parametrize(("accepted", "low", "high"), [(0, 0.0, 0.1), (3, 0.9, 1.0)])
def test_many_rounds_outweigh_the_prior(accepted: int, low: float, high: float) -> None:
    rates = seen(*[(3, accepted)] * 60)
    assert low < rates.conditional(1, 0.5) < high


def test_an_unseen_depth_is_taken_to_be_like_the_one_before() -> None:
    first, second, third = seen(*[(1, 1)] * 60).priors(3)
    assert first > 0.9
    assert first == second == third


def test_a_request_begins_with_the_rates_of_all() -> None:
    priors = seen(*[(2, 1)] * 60).priors(2)
    one, two = Rates().cumulative(priors)
    assert one == pytest.approx(priors[0])
    assert two == pytest.approx(priors[0] * priors[1])
    assert two < 0.15


def test_faded_rates_give_way_to_what_is_seen_next() -> None:
    fresh, faded = seen(*[(1, 0)] * 60), seen(*[(1, 0)] * 60)
    for _ in range(8):
        faded.fade()
    for rates in (fresh, faded):
        for _ in range(6):
            rates.observe(1, 1)
    assert faded.conditional(1, 0.5) > 0.4 > fresh.conditional(1, 0.5)
