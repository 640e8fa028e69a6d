"""How many tokens each request drafts in the next round.

A fixed number, or `auto`: the numbers that give the most tokens per second by what a round costs
(profiled at start, corrected by live rounds) and what each request's drafts have been worth so
far. 0 is a candidate like any other. Now and then the road not taken is tried for one round:
requests that do not draft draft one token, requests that do draft none, or one token more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from headstart.engine.draft_choice import DraftCosts
from headstart.engine.live_costs import Costs, LiveCosts
from headstart.engine.options import EngineOptions, Speculate
from headstart.engine.rates import OVERALL_MEMORY, Rates
from headstart.engine.request import Request
from headstart.engine.round_costs import LiveRounds

_PROBE_EVERY = 64  # rounds without drafts until some are tried again, counted for all requests
_PROBE_RARELY = 256  # the same where one of so many has a head, or less: the others pay for a
_FEW = 4  # round with drafts and tell nothing about them
_PROBE_SOON = 8  # the same after a try that paid,
_QUICK_PROBES = 8  # this often in a row: more would not be news
_PLAIN_EVERY = 256  # rounds with drafts until one without is timed
_DEEPER_EVERY = 16  # the same until one draft more is tried, where a draft costs what it costs,
_HOPELESS_EVERY = 256  # and until it is tried where it promises too little
_ENOUGH = 32.0  # first drafts seen lately, to say what drafts will be worth
_WORTHLESS = 0.02  # expected tokens below which a draft is not even considered

DecidedBy = Literal["fixed", "fastest", "off_above"]


class Speculation:
    """Chooses K for every running request, every round."""

    def __init__(
        self,
        options: EngineOptions,
        costs: Costs | None,
        max_len: int,
        greedy_costs: Costs | None = None,
    ):
        """`greedy_costs`: of rounds in which all requests are greedy, where they differ."""
        self._options, self._max_len = options, max_len
        self._costs = LiveCosts(costs) if costs is not None else None
        self._greedy_costs = self._costs if greedy_costs is None else LiveCosts(greedy_costs)
        self.rounds: LiveRounds | None = None  # of requests that sit on the device
        self._overall = Rates(memory=OVERALL_MEMORY)
        self._rates: dict[str, Rates] = {}
        self._current: dict[str, int] = {}  # K of the last round, by request
        self._typical = 0  # K of the last round, of most requests: where a newcomer begins
        self._rounds_idle = 0  # rounds in which somebody did not draft, since the last try
        self._rounds_drafting = 0  # rounds in which somebody did, since the last without
        self._rounds_shallow = 0  # rounds in which somebody could have drafted more, since a try,
        self._rounds_hopeless = 0  # and since a try of everybody
        self._quick_probes = 0  # in a row
        self._probes_soon = False
        self._probing: set[str] = set()  # whose tries have not come back
        self._probed: list[bool] = []  # whether those that have were right
        self._break_even = 0.0  # how often a try must be right to pay
        self.reason = ""
        self.decided_by: DecidedBy = "fastest" if options.speculate == "auto" else "fixed"
        self.expected_speedup: float | None = None  # over no drafts, where auto chose last

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of a request's drafts in one round."""
        if not num_drafts:
            return
        self._overall.observe(num_drafts, num_accepted)
        self._rates.setdefault(request.id, Rates()).observe(num_drafts, num_accepted)
        if request.id in self._probing:
            self._probing.discard(request.id)
            self._probed.append(num_accepted > 0)
            if not self._probing:
                self._judge_probe()

    def _judge_probe(self) -> None:
        is_right = sum(self._probed) > self._break_even * len(self._probed)
        if not is_right:
            self._quick_probes = 0
        elif self._quick_probes < _QUICK_PROBES:
            self._quick_probes += 1
            self._probes_soon = True

    def observe_verify(self, requests: Sequence[Request], rows: int, seconds: float) -> None:
        """How long a verification took in which nobody read a prompt."""
        if (costs := self._unseated(requests)) is not None:
            costs.observe_verify(len(requests), rows, seconds)

    def observe_drafts(self, drafts: Mapping[Request, int], seconds: float) -> None:
        """How long drafting took; `drafts` are the numbers of those who drafted."""
        costs = self._unseated(drafts)
        if costs is not None and drafts:
            deepest = max(drafts.values())
            active = [sum(k >= depth for k in drafts.values()) for depth in range(1, deepest + 1)]
            costs.observe_drafts(active, seconds)

    def _unseated(self, requests: Iterable[Request]) -> LiveCosts | None:
        """Costs of rounds in parts, by what kind of requests there are."""
        greedy = all(request.takes_most_likely for request in requests)
        return self._greedy_costs if greedy else self._costs

    def round_seconds(
        self, batch: int, num_drafts: int, *, is_greedy: bool = False
    ) -> float | None:
        """What a round costs in which everybody drafts so many; None where nothing was profiled."""
        costs = self.rounds or (self._greedy_costs if is_greedy else self._costs)
        return costs.round_seconds(batch, num_drafts) if costs is not None else None

    def prospect(self, batch: int, context: int) -> float | None:
        """Speed with drafts over that without heads, if everybody drafted; None: not known yet."""
        if self.rounds is None or not self._overall.tried or self._overall.tried[0] < _ENOUGH:
            return None
        chain = Rates().cumulative(self._overall.priors(self._options.max_drafts))
        return self.rounds.prospect(chain, batch, context)

    def is_automatic(self, request: Request) -> bool:
        """Whether the engine chooses how much is drafted for it."""
        return self._asked(request) == "auto"

    def forget(self, request: Request) -> None:
        self._rates.pop(request.id, None)
        self._current.pop(request.id, None)
        self._probing.discard(request.id)

    def choose(
        self, requests: Sequence[Request], num_running: int, *, is_seated: bool = False
    ) -> dict[Request, int]:
        """Drafts for each decoding request, 0 included; `num_running` counts prompts, too.

        Those who sit on the device share captured rounds, which cut by themselves what an answer
        has no room for.
        """
        if not requests:
            return {}
        limit = self._options.speculate_off_above
        if limit is not None and num_running > limit:
            self.reason = f"{num_running} requests run, more than speculate_off_above {limit}"
            self.decided_by = "off_above"
            return dict.fromkeys(requests, 0)
        wishes = {request: self._wish(request) for request in requests}
        rooms = {request: self._room(request) for request in requests}
        fixed = {
            request: wish if is_seated else min(wish, rooms[request])
            for request, wish in wishes.items()
            if wish != "auto"
        }
        automatic = {request: rooms[request] for request in requests if request not in fixed}
        if not automatic:
            is_spared = all(request.is_headless for request in requests)
            self.reason = "no head, drafts would not pay" if is_spared else "fixed"
            self.decided_by = "fastest" if is_spared else "fixed"
            return fixed
        is_seated = is_seated and self.rounds is not None
        costs: DraftCosts | None = self.rounds if is_seated else self._unseated(requests)
        assert costs is not None
        best = self._best(costs, automatic, fixed)
        self._remember(best, automatic)
        num_heads = sum(not request.is_headless for request in requests)
        has_few = _FEW * num_heads <= len(requests)
        tried = self._try_otherwise(costs, best, automatic, has_few=has_few)
        if tried is best and not is_seated:
            tried = self._try_deeper(costs, best, automatic)
        return {**fixed, **tried}

    def _remember(self, best: dict[Request, int], rooms: dict[Request, int]) -> None:
        self._current.update({request.id: drafts for request, drafts in best.items()})
        # Answers that are about to end draft little, whatever would pay.
        free = [k for request, k in best.items() if rooms[request] >= self._options.max_drafts]
        if free:
            self._typical = max(set(free), key=free.count)

    def _wish(self, request: Request) -> Speculate:
        return 0 if request.is_headless else self._asked(request)

    def _asked(self, request: Request) -> Speculate:
        own = request.params.speculate
        return self._options.speculate if own is None else own

    def _room(self, request: Request) -> int:
        """Drafts that can still be used: a round emits one token more than it drafts."""
        return max(0, min(request.room, self._max_len - len(request.tokens)) - 1)

    def _best(
        self, costs: DraftCosts, rooms: dict[Request, int], fixed: dict[Request, int]
    ) -> dict[Request, int]:
        """What gives the most tokens per second by what drafts promise and cost."""
        priors = self._overall.priors(self._options.max_drafts)
        longest = self._overall.priors(max(fixed.values(), default=0))
        choice = costs.best(
            [self._promise(request, priors[:room], costs) for request, room in rooms.items()],
            [self._chain(request, longest[:drafts]) for request, drafts in fixed.items()],
            sum(len(request.tokens) for request in [*rooms, *fixed]),
        )
        self._break_even = choice.break_even
        self.expected_speedup = choice.speed / choice.plain_speed
        if any(rooms.values()):
            self.reason = (
                f"{sum(choice.drafts)} drafts for {len(rooms)} request(s), "
                f"K up to {max(choice.drafts)}, promise {choice.speed:.1f} tokens/s; "
                f"none {choice.plain_speed:.1f}, all {choice.full_speed:.1f}"
            )
            self.decided_by = "fastest"
        return {
            request: min(drafts, rooms[request])
            for request, drafts in zip(rooms, choice.drafts, strict=True)
        }

    def _chain(self, request: Request, priors: list[float]) -> list[float]:
        """Expected tokens of a request's drafts, by depth."""
        return self._rates.get(request.id, Rates()).cumulative(priors)

    def _promise(self, request: Request, priors: list[float], costs: DraftCosts) -> list[float]:
        """The same with a bias towards what the request does already, as far as it is worth it."""
        current = self._current.get(request.id, self._typical)
        more, less = 1 + costs.hysteresis, 1 - costs.hysteresis
        promise = []
        for depth, gain in enumerate(self._chain(request, priors), 1):
            if gain < _WORTHLESS:
                break
            promise.append(gain * (more if depth <= current else less))
        return promise

    def _try_otherwise(
        self,
        costs: DraftCosts,
        best: dict[Request, int],
        rooms: dict[Request, int],
        *,
        has_few: bool,
    ) -> dict[Request, int]:
        """For one round in many, do what was not chosen: otherwise its worth is never known."""
        idle = [request for request, drafts in best.items() if not drafts and rooms[request]]
        if idle:
            self._rounds_idle += 1
            usual = _PROBE_RARELY if has_few else _PROBE_EVERY
            if self._rounds_idle >= (_PROBE_SOON if self._probes_soon else usual):
                self._fade(costs, idle, with_costs=not self._probes_soon)
                self._rounds_idle, self._probes_soon = 0, False
                self._probing, self._probed = {request.id for request in idle}, []
                return {**best, **dict.fromkeys(idle, 1)}
        if any(best.values()):
            self._rounds_drafting += 1
            if self._rounds_drafting >= _PLAIN_EVERY:
                self._rounds_drafting = 0
                costs.fade()
                return dict.fromkeys(best, 0)
        return best

    def _try_deeper(
        self, costs: DraftCosts, best: dict[Request, int], rooms: dict[Request, int]
    ) -> dict[Request, int]:
        """How often a draft behind the last one is right is only known by making it."""
        most, batch = self._options.max_drafts, len(best)
        able = {r: k + 1 for r, k in best.items() if 0 < k < min(rooms[r], most)}
        if not able:
            return best
        self._rounds_shallow += 1
        self._rounds_hopeless += 1
        if self._rounds_shallow < _DEEPER_EVERY:
            return best
        self._rounds_shallow = 0
        if self._rounds_hopeless >= _HOPELESS_EVERY:
            self._rounds_hopeless = 0
            return {**best, **able}
        priors, plain = self._overall.priors(most), costs.round_seconds(batch, 0)
        for request, drafts in able.items():
            more = costs.round_seconds(batch, drafts) - costs.round_seconds(batch, drafts - 1)
            if self._chain(request, priors[:drafts])[-1] > more / plain / 2:
                best = {**best, request: drafts}
        return best

    def _fade(self, costs: DraftCosts, idle: Sequence[Request], *, with_costs: bool) -> None:
        if with_costs:
            costs.fade()
        self._overall.fade()
        for request in idle:
            self._rates.setdefault(request.id, Rates()).fade()
