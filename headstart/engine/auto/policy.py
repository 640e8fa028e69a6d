"""How many tokens each request drafts in the next round.

A fixed number, or `auto`: the numbers that give the most tokens per second by what a round costs
(profiled at start, corrected by live rounds) and what each request's drafts have been worth so
far. 0 is a candidate like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from headstart.copying.drafts import Copy
from headstart.engine.auto.copied_rounds import CopiedRounds
from headstart.engine.auto.copies import (
    CopyRates,
    PlannedRound,
    more_copied,
    with_copies,
    with_more_rows,
)
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.exploration import Exploration
from headstart.engine.auto.live_costs import Choice, LiveCosts
from headstart.engine.auto.rates import AcceptanceRates, LastDrafts
from headstart.engine.options import EngineOptions, Speculate
from headstart.engine.request import Request

_MORE_ROWS_EVERY = 6  # rounds that copy, until one copies more than was chosen
_NEW_SHARE = 0.01  # of a round in the speed-up that is expected, about the last hundred of them

DecidedBy = Literal["fixed", "fastest", "off_above"]


class DraftPolicy:
    """Chooses K for every running request, every round."""

    def __init__(
        self, options: EngineOptions, max_len: int, costs: RoundCosts | None = None,
        greedy_costs: RoundCosts | None = None,
    ):  # fmt: skip
        """`costs` are of rounds that the host drives; needed where a request may ask for `auto`.

        `greedy_costs`: of rounds in which all requests are greedy, where they differ.
        """
        self._options, self._max_len = options, max_len
        self._runs_head, self._is_automatic = options.runs_head, options.is_automatic
        self._costs = LiveCosts(costs) if costs is not None else None
        self._greedy_costs = self._costs if greedy_costs is None else LiveCosts(greedy_costs)
        self.uniform_costs: LiveCosts | None = None  # of rounds that have one K for all requests
        self._used_costs = self._greedy_costs  # of the rounds that ran last
        self.reset()

    def reset(self) -> None:
        """Forget what requests have shown; what rounds cost stays known."""
        self.rates = AcceptanceRates()
        self.copy_rates = CopyRates()
        self._copied_rounds = CopiedRounds(self.copy_rates)
        self._copying_rounds = 0
        self._exploration = Exploration(self.rates, self._options.max_drafts)
        self._promised: dict[Request, list[float]] = {}  # tokens of drafts, for the next round
        self._last = LastDrafts(self._options.max_drafts)
        self.reason = ""
        self.decided_by: DecidedBy = "fastest" if self._is_automatic else "fixed"
        # over no drafts, as `auto` chose in about a hundred rounds: one round says little
        self.expected_speedup: float | None = None

    def profiled(self, *, is_greedy: bool) -> RoundCosts:
        """What rounds that the host drives were taken to cost before the first of them."""
        costs = self._greedy_costs if is_greedy else self._costs
        assert costs is not None, "`auto` profiles rounds"
        return costs.table

    def use_rounds(self, costs: RoundCosts, captured_size: Callable[[int], int]) -> None:
        """Decide for requests in device rounds by these costs from now on."""
        self.uniform_costs = LiveCosts(costs, uniform=True, captured_size=captured_size)

    def choose(
        self, requests: Sequence[Request], num_running: int, *, uniform: bool = False
    ) -> dict[Request, int]:
        """Drafts for each decoding request, 0 included; `num_running` counts prompts, too.

        `uniform`: the requests share one captured round, which costs what its largest K does, and
        cuts by itself what an answer has no room for.
        """
        if not requests:
            return {}
        limit = self._options.speculate_off_above
        if limit is not None and num_running > limit:
            self.reason = f"{num_running} requests run, more than speculate_off_above {limit}"
            self.decided_by = "off_above"
            return dict.fromkeys(requests, 0)
        self._promised = {}
        rooms = {request: self.room(request) for request in requests}
        fixed = {
            request: asked if uniform else min(asked, rooms[request])
            for request in requests
            if (asked := self._of_head(request)) != "auto"
        }
        automatic = {request: rooms[request] for request in requests if request not in fixed}
        if not automatic:
            self.reason, self.decided_by = "fixed", "fixed"
            return fixed
        costs = (self.uniform_costs if uniform else None) or self._host_costs(requests)
        assert costs is not None, "`auto` needs costs"
        self._used_costs = costs
        choice = self._fastest(automatic, fixed, costs)
        best = {
            request: min(drafts, room)
            for (request, room), drafts in zip(automatic.items(), choice.drafts, strict=True)
        }
        self._last.remember(best, automatic)
        varied = self._exploration.vary(best, automatic, costs, break_even=choice.break_even)
        return {**fixed, **varied}

    def plan(
        self, requests: Sequence[Request], num_running: int, copies: Mapping[Request, Copy]
    ) -> PlannedRound:
        """Drafts of a round that the host drives; `copies` is what requests could copy."""
        head = self.choose(requests, num_running=num_running)
        if not copies or self.decided_by == "off_above":
            return PlannedRound(head)
        given = {r: min(asked, len(copies[r].tokens)) for r, asked in self._given(copies).items()}
        free = {r: copy for r, copy in copies.items() if not isinstance(self._asked(r), int)}
        costs = self._host_costs(requests)
        if not free or costs is None:
            return PlannedRound(head, given)
        head_gains = self._head_gains(head)
        copy_gains = {r: self.copy_rates.gains(r.id, copy) for r, copy in free.items()}
        context = sum(len(request.tokens) for request in requests)
        planned = with_copies(head, head_gains, free, copy_gains, costs, context)
        self._copying_rounds += bool(planned.copied)
        if planned.copied and self._copying_rounds % _MORE_ROWS_EVERY == 0:
            planned = with_more_rows(planned, copy_gains)
        return replace(planned, copied={**given, **planned.copied})

    def plan_round(
        self, requests: Sequence[Request], num_running: int, copies: Mapping[Request, Copy]
    ) -> PlannedRound:
        """Drafts of a device round; `copies` is what requests could copy."""
        head = self.choose(requests, num_running=num_running, uniform=True)
        if self.decided_by == "off_above":
            copies = {}
        given = self._given(copies)
        free = {r: copy for r, copy in copies.items() if not isinstance(self._asked(r), int)}
        costs = self.uniform_costs or self._host_costs(requests)
        if not free or costs is None:
            self._copied_rounds.clear()
            return PlannedRound(head, given)
        context = sum(len(request.tokens) for request in requests)
        planned = self._copied_rounds.plan(head, self._head_gains(head), free, costs, context)
        if not given:
            return replace(planned, rows=planned.num_rows)
        # All that copy have as many drafts as any of them, unless they ask for fewer.
        most = max([*given.values(), *planned.copied.values()])
        copied = {**given, **dict.fromkeys(planned.copied, most)}
        return replace(planned, copied=copied, rows=None)

    def _head_gains(self, head: Mapping[Request, int]) -> dict[Request, list[float]]:
        """Expected tokens of the head's drafts, as they were known when numbers were chosen."""
        known, priors = self._promised, self.rates.overall.priors(max(head.values()))
        return {r: (known.get(r) or self.rates.gains(r.id, priors))[:k] for r, k in head.items()}

    def more_copied(self, request: Request, copy: Copy, planned: PlannedRound) -> int:
        """Tokens to copy after the head's drafts, which agree with the copy as far as they go."""
        if isinstance(self._asked(request), int):
            return 0
        gains = self.copy_rates.gains(request.id, copy, confirmed=True)
        return more_copied(gains, len(request.drafts), planned.least_gain)

    def _given(self, requests: Iterable[Request]) -> dict[Request, int]:
        """Drafts that are to be copied, of requests that ask for a number of them."""
        asked = {request: self._asked(request) for request in requests}
        return {request: k for request, k in asked.items() if isinstance(k, int) and k > 0}

    def most_copied(self, request: Request) -> int | None:
        """Tokens that a request copies in a round at most, where it says so."""
        return asked if isinstance(asked := self._asked(request), int) else None

    def _asked(self, request: Request) -> Speculate:
        own = request.params.speculate
        return self._options.speculate if own is None else own

    def _of_head(self, request: Request) -> int | Literal["auto"]:
        """Drafts that the head is to make: none where a request drafts from its context."""
        asked = self._asked(request)
        if asked == "context" or request.params.draft_from == "context":
            return 0
        return asked if self._runs_head else 0

    def room(self, request: Request) -> int:
        """Drafts that can still be used: a round emits one token more than it drafts."""
        longest = min(len(request.prompt_ids) + request.max_tokens, self._max_len)
        return max(0, longest - len(request.tokens) - 1)

    def _fastest(
        self, rooms: Mapping[Request, int], fixed: Mapping[Request, int], costs: LiveCosts
    ) -> Choice:
        """The drafts that give the most tokens per second, by what they promise and cost."""
        priors = self.rates.overall.priors(self._options.max_drafts)
        longest = self.rates.overall.priors(max(fixed.values(), default=0))
        gains = {r: self.rates.gains(r.id, priors[:room]) for r, room in rooms.items()}
        self._promised = gains
        context = sum(len(request.tokens) for request in [*rooms, *fixed])
        choice = costs.best(
            [self._last.biased(r, own, costs.hysteresis) for r, own in gains.items()],
            [self.rates.gains(r.id, longest[:drafts]) for r, drafts in fixed.items()],
            context,
        )  # fmt: skip
        if any(rooms.values()):
            if not fixed:
                self._expect(choice.drafts, list(gains.values()), costs, context)
            self.reason = (
                f"{sum(choice.drafts)} drafts for {len(rooms)} request(s), "
                f"K up to {max(choice.drafts)}, promise {choice.speed:.1f} tokens/s; "
                f"none {choice.plain_speed:.1f}, all {choice.full_speed:.1f}"
            )
            self.decided_by = "fastest"
        return choice

    def _expect(
        self, drafts: Sequence[int], gains: Sequence[Sequence[float]], costs: LiveCosts,
        context: int,
    ) -> None:  # fmt: skip
        """What the chosen drafts bring, without the bias towards the last K."""
        tokens = sum(1 + sum(own[:k]) for k, own in zip(drafts, gains, strict=True))
        plain = costs.seconds_of([0] * len(drafts), context)
        found = tokens / len(drafts) * plain / costs.seconds_of(drafts, context)
        known = found if self.expected_speedup is None else self.expected_speedup
        self.expected_speedup = known + _NEW_SHARE * (found - known)

    def observe_copy(
        self, request: Request, copy: Copy, emitted: list[int], *, confirmed: bool
    ) -> None:
        """What a request went on with where it could copy, whether it did or not."""
        self.copy_rates.observe(request.id, copy, emitted, confirmed=confirmed)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of the head's drafts in one round; of use where `auto` may choose."""
        if num_drafts and self._options.speculate == "auto":
            self.rates.observe(request.id, num_drafts, num_accepted)
            self._exploration.observe(request.id, is_right=num_accepted > 0)

    def observe_verify(self, requests: Sequence[Request], rows: int, seconds: float) -> None:
        """How long a verification took in which no request read its prompt."""
        if (costs := self._host_costs(requests)) is not None:
            self._used_costs = costs
            costs.observe_verify(len(requests), rows, seconds)

    def observe_overhead(self, seconds: float) -> None:
        """How long such a step took besides verification and drafting."""
        if self._used_costs is not None and not self._used_costs.uniform:
            self._used_costs.observe_overhead(seconds)

    def observe_drafts(self, drafts: Mapping[Request, int], seconds: float) -> None:
        """How long drafting took; `drafts` are the numbers of the requests that drafted."""
        costs = self._host_costs(drafts)
        if costs is not None and drafts:
            deepest = max(drafts.values())
            active = [sum(k >= depth for k in drafts.values()) for depth in range(1, deepest + 1)]
            costs.observe_drafts(active, seconds)

    def observe_round(self, size: int, num_drafts: int, context: int, seconds: float) -> None:
        """How long a captured round of that size took in which the head had not to catch up."""
        if self.uniform_costs is not None:
            rows = size * (num_drafts + 1)
            self.uniform_costs.observe_verify(size, rows, seconds, context)

    def _host_costs(self, requests: Iterable[Request]) -> LiveCosts | None:
        """Costs of rounds that the host drives, by what the requests sample."""
        is_greedy = all(request.takes_most_likely for request in requests)
        return self._greedy_costs if is_greedy else self._costs

    def round_seconds(self, batch: int, num_drafts: int) -> float | None:
        """What a round costs in which all requests draft as much; None: nothing was profiled.

        Of requests as they ran last: greedy ones where all were.
        """
        costs = self.uniform_costs or self._used_costs
        return costs.seconds(batch, num_drafts) if costs is not None else None

    def forget(self, request: Request) -> None:
        self.rates.forget(request.id)
        self.copy_rates.forget(request.id)
        self._copied_rounds.forget(request)
        self._promised.pop(request, None)
        self._last.forget(request)
        self._exploration.forget(request.id)
