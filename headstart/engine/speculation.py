"""How many tokens each request drafts in the next round.

A fixed number, or `auto`: the number that gives the most tokens per second by what a round costs
(profiled at start) and what this request's drafts have been worth so far. 0 is a candidate like
any other. While it is chosen, a request now and then drafts one token, to notice when that would
pay again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.engine.cost import CostTable
from headstart.engine.options import EngineOptions, Speculate
from headstart.engine.request import Request

_PRIOR_RATE = 0.6  # of a head nobody has seen work yet
_PRIOR_WEIGHT = 4.0  # rounds that the prior counts for
_MEMORY = 0.97  # weight of the past, per round
_HYSTERESIS = 1.05  # a change must promise this much
_PROBE_EVERY = 64  # rounds without drafts until one is tried again


@dataclass
class Rates:
    """Running conditional acceptance by depth, forgetting slowly."""

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        while len(self.tried) < num_drafts:
            self.tried.append(0.0)
            self.right.append(0.0)
        for depth in range(min(num_accepted + 1, num_drafts)):
            self.tried[depth] = self.tried[depth] * _MEMORY + 1
            self.right[depth] = self.right[depth] * _MEMORY + (depth < num_accepted)

    def conditional(self, depth: int, prior: float) -> float:
        """P(draft at `depth` (from 1) is right, given those before it), shrunk to the prior."""
        tried = self.tried[depth - 1] if depth <= len(self.tried) else 0.0
        right = self.right[depth - 1] if depth <= len(self.right) else 0.0
        return (right + prior * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT)

    def length(self, num_drafts: int, prior: Rates | None = None) -> float:
        """Expected acceptance length with that many drafts."""
        total, chain, rate = 1.0, 1.0, _PRIOR_RATE
        for depth in range(1, num_drafts + 1):
            rate = prior.conditional(depth, rate) if prior is not None else rate
            chain *= self.conditional(depth, rate)
            total += chain
        return total


class Speculation:
    """Chooses K for every running request, every round."""

    def __init__(self, options: EngineOptions, costs: CostTable | None, max_len: int):
        self._options, self._costs, self._max_len = options, costs, max_len
        self._overall = Rates()
        self._rates: dict[str, Rates] = {}
        self._current = 0
        self._idle: dict[str, int] = {}
        self.reason = ""

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        if num_drafts:
            self._overall.observe(num_drafts, num_accepted)
            self._rates.setdefault(request.id, Rates()).observe(num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        self._rates.pop(request.id, None)
        self._idle.pop(request.id, None)

    def choose(self, requests: Sequence[Request]) -> dict[Request, int]:
        """Drafts for each decoding request, 0 included."""
        limit = self._options.speculate_off_above
        if limit is not None and len(requests) > limit:
            self.reason = f"{len(requests)} requests run, more than speculate_off_above {limit}"
            return dict.fromkeys(requests, 0)
        wishes = {request: self._wish(request) for request in requests}
        automatic = [request for request, wish in wishes.items() if wish == "auto"]
        best = self._best(automatic) if automatic else 0
        result = {}
        for request, wish in wishes.items():
            drafts = self._probe(request, best) if wish == "auto" else int(wish)
            result[request] = max(0, min(drafts, self._room(request)))
        if not automatic:
            self.reason = "fixed"
        return result

    def _wish(self, request: Request) -> Speculate:
        own = request.params.speculate
        return self._options.speculate if own is None else own

    def _room(self, request: Request) -> int:
        """Drafts that can still be used: a round emits one token more than it drafts."""
        return min(request.room, self._max_len - len(request.tokens)) - 1

    def _best(self, requests: Sequence[Request]) -> int:
        assert self._costs is not None
        batch = len(requests)
        speeds = {}
        for drafts in range(self._options.max_drafts + 1):
            tokens = sum(
                self._rates.get(r.id, Rates()).length(drafts, self._overall) for r in requests
            )
            speeds[drafts] = tokens / self._costs.round_seconds(batch, drafts)
        best = max(speeds, key=lambda drafts: speeds[drafts])
        current = min(self._current, self._options.max_drafts)
        if speeds[best] > speeds[current] * _HYSTERESIS:
            self._current = best
        self.reason = (
            f"K = {self._current} promises {speeds[self._current]:.1f} tokens/s for {batch} "
            f"request(s), K = 0 {speeds[0]:.1f}, the best (K = {best}) {speeds[best]:.1f}"
        )
        return self._current

    def _probe(self, request: Request, chosen: int) -> int:
        if chosen:
            self._idle.pop(request.id, None)
            return chosen
        idle = self._idle.get(request.id, 0) + 1
        self._idle[request.id] = idle % _PROBE_EVERY
        return 1 if idle == _PROBE_EVERY else 0
