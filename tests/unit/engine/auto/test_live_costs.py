"""A profile is corrected by what rounds really take."""

from __future__ import annotations

import pytest

from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.live_costs import LiveCosts

# Rows are free, a draft step costs a tenth; and to draft at all half a verification more.
FREE_ROWS = ((1, ((0, 1.0),)), (2, ((0, 1.0),)))
FLAT = RoundCosts(FREE_ROWS, draft=((1, 0.1), (2, 0.1)))
SLOW_START = RoundCosts(FREE_ROWS, draft=((1, 0.1), (2, 0.1)), start=((1, 0.5), (2, 0.5)))


def test_what_drafting_costs_once_is_paid_for_by_several_drafts() -> None:
    gains = [[0.45, 0.4, 0.35]]
    assert LiveCosts(FLAT).best([[0.45]], [], 10).drafts == [1]
    assert LiveCosts(SLOW_START).best([[0.45]], [], 10).drafts == [0]
    assert LiveCosts(SLOW_START).best(gains, [], 10).drafts == [3]
    assert LiveCosts(SLOW_START).seconds(1, 3) == pytest.approx(1.8)


def test_a_start_is_corrected_like_the_steps() -> None:
    costs = LiveCosts(SLOW_START)
    for _ in range(100):
        costs.observe_drafts([1, 1, 1], 1.6)  # twice what was expected
    assert costs.start_seconds(1) + 3 * costs.draft_seconds(1) == pytest.approx(1.6, rel=0.02)


def test_a_machine_that_is_slower_as_a_whole_changes_no_comparison() -> None:
    costs = LiveCosts(FLAT)
    for _ in range(200):
        costs.observe_verify(1, 4, 5.0)
        costs.observe_drafts([1, 1, 1], 1.5)
    assert costs.verify_seconds(1, 4) == pytest.approx(costs.verify_seconds(1, 1), rel=0.02)
    assert costs.draft_seconds(1) == pytest.approx(costs.verify_seconds(1, 1) / 10, rel=0.02)


def test_a_k_that_costs_more_than_profiled_is_seen_to_do_so() -> None:
    costs = LiveCosts(FLAT)
    for _ in range(100):
        costs.observe_verify(4, 16, 2.0)
        costs.observe_verify(4, 4, 1.0)
    ratio = costs.verify_seconds(4, 16) / costs.verify_seconds(4, 4)
    assert ratio == pytest.approx(2.0, rel=0.1)
    alike = costs.verify_seconds(64, 256) / costs.verify_seconds(64, 64)
    assert alike == pytest.approx(1.0), "another batch size is another matter"


def test_a_single_pause_of_the_machine_is_not_a_cost() -> None:
    costs = LiveCosts(FLAT)
    for _ in range(20):
        costs.observe_verify(1, 4, 1.0)
    costs.observe_verify(1, 4, 500.0)
    assert costs.verify_seconds(1, 4) < 1.5
    for _ in range(20):
        costs.observe_verify(1, 4, 1.0)
    assert costs.verify_seconds(1, 4) == pytest.approx(1.0, rel=0.1)


def test_what_was_seen_in_a_bad_spell_is_corrected_by_some_tries() -> None:
    costs = LiveCosts(FLAT)
    for _ in range(60):
        costs.observe_verify(1, 1, 1.0)
        costs.observe_verify(1, 4, 1.5)
    before = costs.verify_seconds(1, 4) / costs.verify_seconds(1, 1)
    for _ in range(12):
        for _ in range(20):
            costs.observe_verify(1, 1, 1.0)
        costs.observe_verify(1, 4, 1.0)
    assert before > 1.4
    assert costs.verify_seconds(1, 4) / costs.verify_seconds(1, 1) < 1.1


def test_where_times_vary_a_few_of_them_say_little() -> None:
    """Three times of a K that is tried now and then: on a quiet machine they count."""
    ratios = {}
    for noise in (0.02, 0.5):
        costs = LiveCosts(FLAT)
        for number in range(200):
            costs.observe_verify(1, 1, 1.0 + noise * (-1) ** number)
        for _ in range(3):
            costs.observe_verify(1, 4, 1.5)
        ratios[noise] = costs.verify_seconds(1, 4) / costs.verify_seconds(1, 1)
    assert ratios[0.02] > 1.25 and ratios[0.5] < ratios[0.02] - 0.08


def test_what_a_round_takes_besides_its_passes_counts_and_a_pause_does_not() -> None:
    costs = LiveCosts(FLAT)
    assert costs.seconds_of([3]) == pytest.approx(1.3)
    for _ in range(20):
        costs.observe_overhead(0.2)
    assert costs.seconds_of([3]) == costs.seconds(1, 3) == pytest.approx(1.5)
    costs.observe_overhead(100.0)
    assert costs.seconds_of([3]) < 1.55
    assert costs.seconds_of([3, 1]) == pytest.approx(costs.seconds(2, 3)), "rows are free here"


def test_a_machine_that_slows_down_does_not_make_what_is_not_running_look_cheap() -> None:
    """Regression: under load K = 0 grew dear, and K = 1, timed before, was chosen for it."""
    costs = LiveCosts(FLAT)
    for _ in range(40):
        costs.observe_verify(1, 1, 1.0)
        costs.observe_verify(1, 2, 1.5)
    for _ in range(40):
        costs.observe_verify(1, 1, 3.0)
    assert 1.1 < costs.verify_seconds(1, 2) / costs.verify_seconds(1, 1) < 1.6
