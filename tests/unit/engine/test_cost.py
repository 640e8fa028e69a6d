"""Costs between and beyond what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.engine import cost
from headstart.engine.cost import NEVER_PAYS, RoundCosts, measure
from headstart.engine.curves import levelled

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
def test_a_draft_step_costs_nothing_for_nobody(batch: int, seconds: float) -> None:
    assert COSTS.draft_seconds(batch) == pytest.approx(seconds)


def test_a_round_is_a_verification_and_its_draft_steps() -> None:
    assert COSTS.round_seconds(4, 2) == pytest.approx(4.0 + 2 * 0.4)
    assert NEVER_PAYS.round_seconds(1, 2) == pytest.approx(3 * NEVER_PAYS.round_seconds(1, 0))


@pytest.mark.parametrize(
    ("seconds", "batches"), [(0.001, [1, 2, 4, 8, 16]), (0.02, [1, 8]), (0.2, [1])]
)
def test_that_batching_pays_is_seen_where_rounds_are_quick(
    seconds: float, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten timings take as long as the clock says; it was extrapolated from one request."""
    now = [0.0]

    class Profile:
        def __init__(self, *given: object):
            pass

        def has_room(self, batch: int, drafts: int) -> bool:
            return True

        def verify_seconds(self, batch: int, drafts: int) -> float:
            now[0] += 4 * seconds * (1 + batch / 16)
            return seconds * (1 + batch / 16)

        def draft_seconds(self, batch: int, drafts: int) -> float:
            return seconds / 10 * drafts

    monkeypatch.setattr(cost, "_Profile", Profile)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    nothing: Any = None
    found = measure(nothing, nothing, num_blocks=9, max_batch=16, max_rows=999)
    assert [batch for batch, _ in found.verify] == batches


def test_noise_makes_no_large_batch_free() -> None:
    noisy = RoundCosts(verify=((1, ((0, 2.0),)), (2, ((0, 1.0),))), draft=((1, 1.0),))
    assert noisy.verify_seconds(64, 64) == 1.0


def test_a_measurement_that_was_disturbed_is_corrected_by_larger_ones() -> None:
    disturbed = [(1, ((0, 1.0), (1, 9.0), (2, 1.2))), (2, ((0, 5.0), (1, 2.2), (2, 2.4)))]
    assert levelled(disturbed) == (
        (1, ((0, 1.0), (1, 1.2), (2, 1.2))),
        (2, ((0, 2.2), (1, 2.2), (2, 2.4))),
    )
