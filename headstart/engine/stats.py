"""Acceptance counters and times, of a request and of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _grow(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))


@dataclass
class Acceptance:
    """What became of drafts.

    Rates are `cumulative` (per round) or `conditional` (given that the depth before was right).
    """

    rounds: int = 0  # verification rounds, those without drafts included
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)  # by depth

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.rounds += 1
        _grow(self.drafted, num_drafts)
        _grow(self.accepted, num_drafts)
        for depth in range(num_drafts):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < num_accepted

    def add(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        _grow(self.drafted, len(other.drafted))
        _grow(self.accepted, len(other.accepted))
        for depth, (drafted, accepted) in enumerate(
            zip(other.drafted, other.accepted, strict=True)
        ):
            self.drafted[depth] += drafted
            self.accepted[depth] += accepted

    @property
    def cumulative(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional(self) -> list[float]:
        rates, before = [], 1.0
        for rate in self.cumulative:
            rates.append(rate / before if before else 0.0)
            before = rate
        return rates

    @property
    def length(self) -> float:
        """Acceptance length: tokens per trunk pass, recovered and bonus tokens included."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "cumulative_acceptance": self.cumulative,
            "conditional_acceptance": self.conditional,
            "acceptance_length": self.length,
        }


@dataclass
class RequestStats:
    """Counters and times of one request."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seed: int = 0


@dataclass
class EngineStats:
    """Counters of a whole engine since it started."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    trunk_seconds: float = 0.0
    draft_seconds: float = 0.0
    chosen_drafts: dict[int, int] = field(default_factory=dict)  # K -> rounds
    draft_reason: str = ""  # why the last K was chosen
