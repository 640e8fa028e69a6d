"""Rounds of blank requests, timed before the first real one: what `auto` decides by.

Whole batches are timed: the same rows in one request would lack the spans, the sampling and the
Python that each request brings. Greedy requests are timed separately: to sample a token can take
longer than a row. `blank_passes.py` runs the host's rounds, the backend runs device rounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from headstart.backends.base import DeviceRounds
from headstart.engine.auto.costs import (
    NEVER_PAYS,
    Curve,
    RoundCosts,
    level,
    level_surface,
)
from headstart.engine.options import MENU, VERIFIED
from headstart.sampling.params import SamplingParams

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_QUICK_SECONDS = 0.05  # a round in which the choice of tokens counts
_BUDGET_SECONDS = 1.0  # larger batches than fit into this are extrapolated,
_LEAST_BATCH = 8  # but of quick rounds not from smaller ones: that batching pays must be seen
_SAMPLED, _GREEDY = SamplingParams(temperature=1), SamplingParams(temperature=0)


class PassTimer(Protocol):
    """Times the parts of rounds that the host drives."""

    def has_room(self, batch: int, drafts: int) -> bool:
        """Whether there is memory for such a round."""
        ...

    def verify_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        """Of each number of drafts, timed in turns: a bad spell of the machine hits all alike."""
        ...

    def draft_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]: ...


def profile_host_rounds(
    timer: PassTimer, *, max_batch: int
) -> tuple[RoundCosts, RoundCosts | None]:
    """Costs of sampled and of greedy requests; of a slow model both are the same."""
    sampled = profile_passes(timer, max_batch, _SAMPLED)
    is_quick = sampled is not NEVER_PAYS and sampled.round_seconds(1, 0) < _QUICK_SECONDS
    return sampled, profile_passes(timer, max_batch, _GREEDY) if is_quick else None


def profile_passes(timer: PassTimer, max_batch: int, params: SamplingParams) -> RoundCosts:
    """Verification and drafting by batch size, as many as there is time for."""
    verification: list[tuple[int, Curve]] = []
    first: list[tuple[int, float]] = []  # seconds until one draft is made,
    step: list[tuple[int, float]] = []  # and for each one more
    spent = last = 0.0
    for batch in [size for size in _BATCHES if size == 1 or size <= max_batch]:
        drafts = [count for count in VERIFIED if timer.has_room(batch, count)]
        if spent + 2 * last > _BUDGET_SECONDS:
            # A few numbers of drafts say enough of the one batch that is still timed.
            is_quick = verification[0][1][0][1] < _QUICK_SECONDS
            drafts = drafts[:3] if batch == _LEAST_BATCH and is_quick else []
            if batch < _LEAST_BATCH:
                continue
        if drafts in ([], [0]):
            break
        started = time.perf_counter()
        seconds = timer.verify_seconds(batch, drafts, params)
        verification.append((batch, tuple(zip(drafts, seconds, strict=True))))
        most = max(count for count in MENU if count <= drafts[-1])
        one, several = timer.draft_seconds(batch, (1, most), params)
        first.append((batch, one))
        more = max(0.0, several - one) / (most - 1) if most > 1 else one
        step.append((batch, more))
        last = time.perf_counter() - started
        spent += last
    if not verification:
        return NEVER_PAYS
    draft = level(step)
    start = [
        (batch, max(0.0, one - each))
        for (batch, one), (_, each) in zip(level(first), draft, strict=True)
    ]
    return RoundCosts(level_surface(verification), draft, tuple(start))


def profile_device_rounds(rounds: DeviceRounds) -> RoundCosts:
    """Whole rounds by size and drafts, what context adds to them, and what catching up does."""
    times = rounds.time_rounds()
    if not times:
        return RoundCosts(((1, tuple((k, NEVER_PAYS.round_seconds(1, k)) for k in MENU)),))
    return RoundCosts(
        tuple((own.size, tuple(own.seconds.items())) for own in times),
        context=tuple((own.size, tuple(own.per_token.items())) for own in times),
        catch_up=tuple((own.size, own.catch_up) for own in times),
        window=rounds.window - 1,
        passes=rounds.time_passes(),
    )
