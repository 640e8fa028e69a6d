"""What drafts promise: how often they have been right lately, by depth, of each request and of all
together; and how many each request had last, as another number must promise clearly more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headstart.engine.request import Request

_PRIOR_RATE = 0.6  # of a head that has not been seen to work yet
_PRIOR_WEIGHT = 4.0  # rounds that this guess counts for,
_OTHERS_WEIGHT = 8.0  # and what is known of all requests, for one of them
_MEMORY = 0.98  # weight of the past, per round
_OVERALL_MEMORY = 0.995  # the same where many requests report in every round
_FADING = 0.85  # weight of the past when drafts are tried again after a pause
_WORTHLESS = 0.02  # expected tokens below which a draft is not even considered


@dataclass
class Rates:
    """Running conditional acceptance rates by depth, forgetting slowly."""

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    memory: float = _MEMORY

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        while len(self.tried) < num_drafts:
            self.tried.append(0.0)
            self.right.append(0.0)
        for depth in range(min(num_accepted + 1, num_drafts)):
            self.tried[depth] = self.tried[depth] * self.memory + 1
            self.right[depth] = self.right[depth] * self.memory + (depth < num_accepted)

    def fade(self) -> None:
        """What was seen before a pause counts for less: text and users change meanwhile."""
        self.tried = [count * _FADING for count in self.tried]
        self.right = [count * _FADING for count in self.right]

    def conditional(self, depth: int, prior: float) -> float:
        """P(draft at `depth` (from 1) is right, given those before it), shrunk to the prior."""
        tried = self.tried[depth - 1] if depth <= len(self.tried) else 0.0
        right = self.right[depth - 1] if depth <= len(self.right) else 0.0
        return (right + prior * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT)

    def priors(self, num_drafts: int, first: float = _PRIOR_RATE) -> list[float]:
        """Conditional rates by depth; a depth never seen is taken to be like the one before.

        `first`: what is taken of the first depth before anything was seen.
        """
        rates, rate = [], first
        for depth in range(1, num_drafts + 1):
            rate = self.conditional(depth, rate)
            rates.append(rate)
        return rates

    def cumulative(self, priors: list[float]) -> list[float]:
        """P(drafts 1 to depth are all right), for every depth that has a prior."""
        result, chain = [], 1.0
        seen = zip(priors, self.tried, self.right, strict=False)
        for prior, tried, right in seen:  # as `conditional`, without a call: this runs very often
            chain *= (right + prior * _OTHERS_WEIGHT) / (tried + _OTHERS_WEIGHT)
            result.append(chain)
        for prior in priors[len(result) :]:
            chain *= prior
            result.append(chain)
        return result


_NOTHING = Rates()  # was seen


class AcceptanceRates:
    """Rates of every request by its id, and of all requests together."""

    def __init__(self) -> None:
        self.overall = Rates(memory=_OVERALL_MEMORY)
        self._own: dict[str, Rates] = {}

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts of a round."""
        self.overall.observe(num_drafts, num_accepted)
        self._own.setdefault(request_id, Rates()).observe(num_drafts, num_accepted)

    def gains(self, request_id: str, priors: list[float]) -> list[float]:
        """Expected tokens of each draft of a request: cumulative rates, by depth."""
        return self._own.get(request_id, _NOTHING).cumulative(priors)

    def fade(self, request_ids: Iterable[str]) -> None:
        """Before these requests draft again."""
        self.overall.fade()
        for request_id in request_ids:
            self._own.setdefault(request_id, Rates()).fade()

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)


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
