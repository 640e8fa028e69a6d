"""Acceptance counters by depth, filled by the engine while it decodes and by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _grow(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))


@dataclass
class Acceptance:
    """What became of drafts.

    Rates are `cumulative` (per round that drafted so deep) or `conditional` (given that the depth
    before was right). Rounds may draft differently many tokens, so both have counts of their own:
    rounds that draft deep are the promising ones, and a ratio of cumulative rates could exceed 1.
    """

    rounds: int = 0  # verification rounds, those without drafts included
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)  # by depth
    # By depth: the rounds that drafted there and had everything before it accepted.
    tried: list[int] = field(default_factory=list)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.rounds += 1
        _grow(self.drafted, num_drafts)
        _grow(self.accepted, num_drafts)
        _grow(self.tried, num_drafts)
        for depth in range(num_drafts):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < num_accepted
            self.tried[depth] += depth <= num_accepted

    def add(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        _grow(self.drafted, len(other.drafted))
        _grow(self.accepted, len(other.accepted))
        _grow(self.tried, len(other.tried))
        for depth, (drafted, accepted, tried) in enumerate(
            zip(other.drafted, other.accepted, other.tried, strict=True)
        ):
            self.drafted[depth] += drafted
            self.accepted[depth] += accepted
            self.tried[depth] += tried

    @property
    def cumulative(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional(self) -> list[float]:
        return [a / t if t else 0.0 for a, t in zip(self.accepted, self.tried, strict=True)]

    @property
    def per_round(self) -> list[float]:
        """By depth, also of rounds that drafted less: `length` is 1 and the sum of these."""
        return [accepted / self.rounds if self.rounds else 0.0 for accepted in self.accepted]

    @property
    def length(self) -> float:
        """Acceptance length: tokens per trunk pass, recovered and bonus tokens included."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "tried": list(self.tried),
            "cumulative_acceptance": self.cumulative,
            "conditional_acceptance": self.conditional,
            "acceptance_length": self.length,
        }
