"""Costs between and beyond what was measured."""

from __future__ import annotations

import pytest

from headstart.engine.auto.costs import NEVER_PAYS, RoundCosts, level_surface

COSTS = RoundCosts(
    verify=((1, ((0, 1.0), (2, 1.2))), (4, ((0, 2.0), (2, 4.0)))), draft=((1, 0.1), (4, 0.4))
)


@pytest.mark.parametrize(
    ("batch", "rows", "seconds"),
    [(1, 1, 1.0), (1, 3, 1.2), (1, 2, 1.1), (4, 12, 4.0), (4, 6, 2.5), (2, 2, 4 / 3),
     (1, 5, 1.4), (7, 7, 3.0), (7, 21, 6.8)],
    ids=["point", "point", "between drafts", "point", "drafts that differ by request",
         "between batches", "more drafts", "more requests", "more of both"],
)  # fmt: skip
def test_a_verification_costs_what_its_neighbours_say(
    batch: int, rows: int, seconds: float
) -> None:
    assert COSTS.verify_seconds(batch, rows) == pytest.approx(seconds)


@pytest.mark.parametrize(("batch", "seconds"), [(0, 0.0), (1, 0.1), (2, 0.2), (8, 0.8)])
def test_a_draft_step_costs_nothing_for_no_request(batch: int, seconds: float) -> None:
    assert COSTS.draft_seconds(batch) == pytest.approx(seconds)


def test_a_round_is_a_verification_and_its_draft_steps() -> None:
    assert COSTS.round_seconds(4, 2) == pytest.approx(4.0 + 2 * 0.4)
    assert NEVER_PAYS.round_seconds(1, 2) == pytest.approx(3 * NEVER_PAYS.round_seconds(1, 0))


def test_noise_makes_no_large_batch_free() -> None:
    noisy = RoundCosts(verify=((1, ((0, 2.0),)), (2, ((0, 1.0),))), draft=((1, 1.0),))
    assert noisy.verify_seconds(64, 64) == 1.0


def test_a_measurement_that_was_disturbed_is_corrected_by_larger_ones() -> None:
    disturbed = [(1, ((0, 1.0), (1, 9.0), (2, 1.2))), (2, ((0, 5.0), (1, 2.2), (2, 2.4)))]
    assert level_surface(disturbed) == (
        (1, ((0, 1.0), (1, 1.2), (2, 1.2))),
        (2, ((0, 2.2), (1, 2.2), (2, 2.4))),
    )
