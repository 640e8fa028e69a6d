"""How many drafts each request had last: another number must promise clearly more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headstart.engine.request import Request

_WORTHLESS = 0.02  # expected tokens below which a draft is not even considered


@dataclass
class LastDrafts:
    """K of every request in the last round, and of most of them, where a new request begins."""

    max_drafts: int
    _of: dict[str, int] = field(default_factory=dict)  # by request
    _typical: int = 0

    def biased(self, request: Request, gains: Sequence[float], hysteresis: float) -> list[float]:
        """Expected tokens with a bias towards the last K, as far as drafts are worth something."""
        last = self._of.get(request.id, self._typical)
        biased = []
        for depth, gain in enumerate(gains, 1):
            if gain < _WORTHLESS:
                break
            biased.append(gain * (1 + hysteresis if depth <= last else 1 - hysteresis))
        return biased

    def remember(self, best: Mapping[Request, int], rooms: Mapping[Request, int]) -> None:
        self._of.update({request.id: drafts for request, drafts in best.items()})
        # Answers that are about to end draft little, whatever would pay.
        free = [k for request, k in best.items() if rooms[request] >= self.max_drafts]
        if free:
            self._typical = max(set(free), key=free.count)

    def forget(self, request: Request) -> None:
        self._of.pop(request.id, None)
