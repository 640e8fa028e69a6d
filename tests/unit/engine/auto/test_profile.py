"""What is timed at start, and the table that comes of it: timers are made up, no model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from headstart.backends.base import DeviceRounds, SizeTimes
from headstart.engine.auto import profile
from headstart.engine.auto.costs import NEVER_PAYS, RoundCosts
from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.profile import profile_device_rounds, profile_host_rounds
from headstart.engine.options import MENU
from headstart.sampling.params import SamplingParams


@dataclass
class Passes:
    """A pass of one request takes `seconds`, of more of them longer; sampling takes as much."""

    seconds: float
    now: float = 0.0
    memory: int = 10**6  # rows
    sampling: float = 0.0

    def has_room(self, batch: int, drafts: int) -> bool:
        return batch * (drafts + 1) <= self.memory

    def verify_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        seconds = self.seconds * (1 + batch / 16)
        self.now += 4 * seconds * len(counts)
        return [seconds + self.sampling * (params.temperature > 0)] * len(counts)

    def draft_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        return [self.seconds / 10 * drafts for drafts in counts]


@pytest.mark.parametrize(
    ("seconds", "batches"), [(0.001, [1, 2, 4, 8, 16]), (0.02, [1, 8]), (0.2, [1])]
)
def test_that_batching_pays_is_seen_where_rounds_are_quick(
    seconds: float, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten timings take as long as the clock says; it was extrapolated from one request."""
    passes = Passes(seconds)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: passes.now)
    found, _ = profile_host_rounds(passes, max_batch=16)
    assert [batch for batch, _ in found.verify] == batches


@pytest.mark.parametrize(("seconds", "is_quick"), [(0.001, True), (0.2, False)])
def test_greedy_requests_are_timed_separately_where_rounds_are_quick(
    seconds: float, is_quick: bool
) -> None:
    sampled, greedy = profile_host_rounds(Passes(seconds, sampling=0.01), max_batch=2)
    assert (greedy is not None) == is_quick
    if greedy is not None:
        assert sampled.round_seconds(1, 3) - greedy.round_seconds(1, 3) == pytest.approx(0.01)


def test_noise_makes_no_draft_free() -> None:
    """Regression: a profile said that drafting took no time, and the first live time failed by it.

    Of one request eight drafts took as long as one, of two requests eight times as long.
    """

    class Noisy(Passes):
        def draft_seconds(
            self, batch: int, counts: Sequence[int], params: SamplingParams
        ) -> list[float]:
            return [0.1 if batch == 1 else 0.1 * drafts for drafts in counts]

    table, _ = profile_host_rounds(Noisy(0.2), max_batch=2)
    assert table.start_seconds(1) + table.draft_seconds(1) == pytest.approx(0.1)
    LiveCosts(table).observe_drafts([1], 0.1)


def test_without_memory_for_a_round_with_drafts_none_pays() -> None:
    assert profile_host_rounds(Passes(0.001, memory=1), max_batch=4) == (NEVER_PAYS, None)


@dataclass
class TimedRounds:
    """Device rounds of which the backend says what they took."""

    times: list[SizeTimes]
    window: int = 16

    def time_rounds(self) -> list[SizeTimes]:
        return self.times

    def time_passes(self) -> tuple[tuple[int, float], ...]:
        return ((64, 4.0), (128, 6.0))


def times(size: int, per_token: float = 0.001) -> SizeTimes:
    """A round takes 4 s and 1 s per draft, and so much per token of context."""
    menu = range(4)
    return SizeTimes(size, {k: 4.0 + k for k in menu}, dict.fromkeys(menu, per_token), catch_up=0.3)


def profiled(*found: SizeTimes) -> RoundCosts:
    return profile_device_rounds(cast(DeviceRounds, TimedRounds(list(found))))


def test_device_rounds_are_told_apart_by_drafts_context_and_catching_up() -> None:
    table = profiled(times(1), times(4))
    assert table.menu == (0, 1, 2, 3)
    assert [size for size, _ in table.verify] == [1, 4]
    assert table.round_seconds(4, 3) == pytest.approx(7.0)
    assert table.round_seconds(4, 3, context=5000) == pytest.approx(12.0)
    assert table.catch_up_seconds(4) == pytest.approx(0.3 / 15)


def test_without_memory_for_a_device_round_no_draft_pays() -> None:
    table = profiled()
    assert table.menu == MENU
    assert table.round_seconds(1, 2) == pytest.approx(3 * table.round_seconds(1, 0))
