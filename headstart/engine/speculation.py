"""How many tokens each request drafts in the next round.

A fixed number, or `auto`: the numbers that give the most tokens per second by what a round costs
(profiled at start, corrected by live rounds) and what each request's drafts have been worth so
far. 0 is a candidate like any other. Now and then the road not taken is tried for one round:
requests that do not draft draft one token, requests that do draft none.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.engine.live_costs import Costs, LiveCosts
from headstart.engine.options import EngineOptions, Speculate
from headstart.engine.rates import Rates
from headstart.engine.request import Request

_HYSTERESIS = 0.05  # a draft that was not made must promise this much more, one that was less
_PROBE_EVERY = 64  # rounds without drafts until some are tried again, counted for all requests
_PROBE_SOON = 8  # the same after a try that was right,
_QUICK_PROBES = 8  # this often in a row: more would not be news
_PLAIN_EVERY = 256  # rounds with drafts until one without is timed
_WORTHLESS = 0.02  # expected tokens below which a draft is not even considered


class Speculation:
    """Chooses K for every running request, every round."""

    def __init__(self, options: EngineOptions, costs: Costs | None, max_len: int):
        self._options, self._max_len = options, max_len
        self._costs = LiveCosts(costs) if costs is not None else None
        self._overall = Rates()
        self._rates: dict[str, Rates] = {}
        self._current: dict[str, int] = {}  # K of the last round, by request
        self._typical = 0  # K of the last round, of most requests: where a newcomer begins
        self._rounds_idle = 0  # rounds in which somebody did not draft, since the last try
        self._rounds_drafting = 0  # rounds in which somebody did, since the last without
        self._quick_probes = 0  # in a row
        self._probe_after = _PROBE_EVERY
        self._probing: set[str] = set()
        self.reason = ""

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of a request's drafts in one round."""
        if not num_drafts:
            return
        self._overall.observe(num_drafts, num_accepted)
        self._rates.setdefault(request.id, Rates()).observe(num_drafts, num_accepted)
        if request.id in self._probing:
            self._probing.discard(request.id)
            if not num_accepted:
                self._quick_probes = 0
            elif self._quick_probes < _QUICK_PROBES:
                self._quick_probes += 1
                self._probe_after = _PROBE_SOON

    def observe_verify(self, batch: int, rows: int, seconds: float) -> None:
        """How long a verification took in which nobody read a prompt."""
        if self._costs is not None:
            self._costs.observe_verify(batch, rows, seconds)

    def observe_drafts(self, drafts: Sequence[int], seconds: float) -> None:
        """How long drafting took; `drafts` are the numbers of those who drafted."""
        if self._costs is not None and drafts:
            active = [sum(k >= depth for k in drafts) for depth in range(1, max(drafts) + 1)]
            self._costs.observe_drafts(active, seconds)

    def forget(self, request: Request) -> None:
        self._rates.pop(request.id, None)
        self._current.pop(request.id, None)
        self._probing.discard(request.id)

    def choose(self, requests: Sequence[Request], num_running: int) -> dict[Request, int]:
        """Drafts for each decoding request, 0 included; `num_running` counts prompts, too."""
        if not requests:
            return {}
        limit = self._options.speculate_off_above
        if limit is not None and num_running > limit:
            self.reason = f"{num_running} requests run, more than speculate_off_above {limit}"
            return dict.fromkeys(requests, 0)
        wishes = {request: self._wish(request) for request in requests}
        fixed = {
            request: min(wish, self._room(request))
            for request, wish in wishes.items()
            if wish != "auto"
        }
        automatic = [request for request in requests if request not in fixed]
        if not automatic:
            self.reason = "fixed"
            return fixed
        best = self._best(automatic, list(fixed.values()))
        self._remember(best)
        return {**fixed, **self._try_otherwise(best)}

    def _remember(self, best: dict[Request, int]) -> None:
        self._current.update({request.id: drafts for request, drafts in best.items()})
        # Answers that are about to end draft little, whatever would pay.
        free = [k for request, k in best.items() if self._room(request) >= self._options.max_drafts]
        if free:
            self._typical = max(set(free), key=free.count)

    def _wish(self, request: Request) -> Speculate:
        own = request.params.speculate
        return self._options.speculate if own is None else own

    def _room(self, request: Request) -> int:
        """Drafts that can still be used: a round emits one token more than it drafts."""
        return max(0, min(request.room, self._max_len - len(request.tokens)) - 1)

    def _best(self, requests: Sequence[Request], fixed: Sequence[int]) -> dict[Request, int]:
        """Add drafts in the order of what they promise; stop where tokens per second are most."""
        assert self._costs is not None
        batch = len(requests) + len(fixed)
        rows = batch + sum(fixed)
        tokens = float(len(requests))
        active = [sum(k > depth for k in fixed) for depth in range(self._options.max_drafts)]
        drafting = sum(map(self._costs.draft_seconds, active))
        best_count, best = 0, tokens / (self._costs.verify_seconds(batch, rows) + drafting)
        speeds = [best]
        ranked = self._ranked(requests)
        for count, (gain, depth, _) in enumerate(ranked, 1):
            tokens += gain
            drafting -= self._costs.draft_seconds(active[depth - 1])
            active[depth - 1] += 1
            drafting += self._costs.draft_seconds(active[depth - 1])
            speeds.append(tokens / (self._costs.verify_seconds(batch, rows + count) + drafting))
            if speeds[-1] > best:
                best_count, best = count, speeds[-1]
        result = dict.fromkeys(requests, 0)
        for _, _, request in ranked[:best_count]:
            result[request] += 1
        if any(map(self._room, requests)):
            self.reason = (
                f"{best_count} drafts for {len(requests)} request(s), "
                f"K up to {max(result.values())}, promise {best:.1f} tokens/s; "
                f"none {speeds[0]:.1f}, all {speeds[-1]:.1f}"
            )
        return result

    def _ranked(self, requests: Sequence[Request]) -> list[tuple[float, int, Request]]:
        """(expected tokens, depth, request) of every draft that could be made, best first."""
        priors = self._overall.priors(self._options.max_drafts)
        drafts = []
        for request in requests:
            current = self._current.get(request.id, self._typical)
            chain = self._rates.get(request.id, Rates()).cumulative(priors)
            for depth, gain in enumerate(chain[: self._room(request)], 1):
                if gain < _WORTHLESS:
                    break
                held = 1 + _HYSTERESIS if depth <= current else 1 - _HYSTERESIS
                drafts.append((gain * held, depth, request))
        drafts.sort(key=lambda draft: (-draft[0], draft[1]))
        return drafts

    def _try_otherwise(self, best: dict[Request, int]) -> dict[Request, int]:
        """For one round in many, do what was not chosen: otherwise its worth is never known."""
        assert self._costs is not None
        idle = [request for request, drafts in best.items() if not drafts and self._room(request)]
        if idle:
            self._rounds_idle += 1
            if self._rounds_idle >= self._probe_after:
                self._fade(idle, with_costs=self._probe_after == _PROBE_EVERY)
                self._rounds_idle, self._probe_after = 0, _PROBE_EVERY
                self._probing = {request.id for request in idle}
                return {**best, **dict.fromkeys(idle, 1)}
        if any(best.values()):
            self._rounds_drafting += 1
            if self._rounds_drafting >= _PLAIN_EVERY:
                self._rounds_drafting = 0
                self._costs.fade()
                return dict.fromkeys(best, 0)
        return best

    def _fade(self, idle: Sequence[Request], *, with_costs: bool) -> None:
        assert self._costs is not None
        if with_costs:
            self._costs.fade()
        self._overall.fade()
        for request in idle:
            self._rates.setdefault(request.id, Rates()).fade()
