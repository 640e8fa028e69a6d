"""Rates of drafting are those of the last minute in which there were rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headstart.sampling.acceptance import Acceptance
from headstart.server.metrics.readings import RecentAcceptance


class Decoding:
    """An engine that has nothing but counters, sampled once a second."""

    def __init__(self) -> None:
        self.recent, self.seconds = RecentAcceptance(), 0.0
        self.acceptance = Acceptance()
        self.engine: Any = SimpleNamespace(stats=SimpleNamespace(acceptance=self.acceptance))
        self.recent.observe(self.engine, self.seconds)

    def run(self, seconds: int, *, accepted: int | None) -> None:
        """A round of two drafts each second; None: no rounds."""
        for _ in range(seconds):
            if accepted is not None:
                self.acceptance.observe(2, accepted)
            self.seconds += 1
            self.recent.observe(self.engine, self.seconds)

    @property
    def rate(self) -> float:
        return self.recent.values(self.engine)["spec_decode_draft_acceptance_rate", ()]


def test_rounds_of_more_than_a_minute_ago_do_not_count() -> None:
    decoding = Decoding()
    decoding.run(100, accepted=0)
    assert decoding.rate == 0
    decoding.run(30, accepted=2)
    assert 0.4 < decoding.rate < 0.6
    decoding.run(61, accepted=2)
    assert decoding.rate == 1


def test_the_rate_stays_while_nothing_is_decoded() -> None:
    decoding = Decoding()
    decoding.run(10, accepted=1)
    decoding.run(300, accepted=None)
    assert decoding.rate == 0.5, "asked for the first time"
    decoding.run(300, accepted=None)
    assert decoding.rate == 0.5
