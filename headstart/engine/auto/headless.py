"""Requests that are answered without a head, where drafts do not pay: it would read for nothing.

Only with `auto`, and only requests that decode in captured rounds. A few keep their head, so that
what drafts are worth stays known. When drafting pays again, because requests have ended or because
drafts are right more often, headless requests start again with a head, if what they still have to
generate is worth reading them once more: they keep their tokens, as after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.auto.rates import Rates
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request

# Of the speed without heads: drafts that promise less do not pay, drafts that promise more do.
# Between the two nothing changes: few heads tell inexactly what drafts are worth, and a batch that
# is half with heads and half without has the worst of both.
_TOO_LITTLE, _ENOUGH = 0.99, 1.03
_KEPT = 8  # one request of so many keeps its head
_WORTH = 2.0  # times what it costs, a second start must save
_CHECK_EVERY = 16  # steps between two looks at that
_KNOWN = 32.0  # first drafts seen lately, to say what drafts will be worth


class Headless:
    """Decides for one engine, by the rates and costs of its `DraftPolicy`."""

    def __init__(
        self,
        options: EngineOptions,
        policy: DraftPolicy,
        decodes_in_rounds: Callable[[Request], bool],
    ):
        self._options, self._policy, self._decodes_in_rounds = options, policy, decodes_in_rounds
        self._is_dear = False  # whether heads cost more than they give, to all waiting requests
        self._steps = 0

    def look(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Before requests are admitted: what will drafts be worth when all waiting ones are in?"""
        if not waiting:
            return
        known = [*running, *waiting][: self._options.max_running_requests]
        prospect = self.prospect(len(known), _context(known))
        limit = _ENOUGH if self._is_dear else _TOO_LITTLE
        self._is_dear = prospect is not None and prospect < limit

    def goes_without(self, request: Request) -> bool:
        """Whether a request is admitted without a head."""
        first_of_group = request.arrival - request.sample  # samples of one prompt share blocks
        return (
            self._is_dear
            and self._policy.is_automatic(request)
            and not request.was_headless
            and first_of_group % _KEPT != 0
            and self._decodes_in_rounds(request)
        )

    def to_start_again(self, running: Sequence[Request]) -> list[Request]:
        """Headless requests in captured rounds that are better off with a head; now and then."""
        self._steps += 1
        spared = [
            request for request in running if request.is_headless and request.seat is not None
        ]
        if self._steps % _CHECK_EVERY or not spared:
            return []
        costs, context = self._policy.uniform_costs, _context(running)
        prospect = self.prospect(len(running), context)
        if costs is None or prospect is None or prospect < _ENOUGH:
            return []
        # Where an answer ends is not known: it is taken to be half done, or nearer to its limit.
        left = sum(min(r.room, r.num_output) for r in spared) / len(spared)
        plain_seconds = costs.seconds(len(running), 0, context, catches_up=False)
        saved = left * plain_seconds * (1 - 1 / prospect)
        cost = sum(len(r.tokens) for r in spared) * _row_seconds(costs.table)
        return spared if saved > _WORTH * cost else []

    def prospect(self, batch: int, context: int) -> float | None:
        """Speed with drafts over that without heads, if all drafted; None: not known yet.

        The K above 0 that is best for all; heads that do not exist need not catch up.
        """
        costs, overall = self._policy.uniform_costs, self._policy.rates.overall
        if costs is None or not overall.tried or overall.tried[0] < _KNOWN:
            return None
        gains = Rates().cumulative(overall.priors(self._options.max_drafts))
        plain = costs.seconds(batch, 0, context, catches_up=False)
        speeds = [
            (1 + sum(gains[:drafts])) * plain / costs.seconds(batch, drafts, context)
            for drafts in costs.table.menu
            if 0 < drafts <= len(gains)
        ]
        return max(speeds, default=0.0)


def _row_seconds(table: RoundCosts) -> float:
    """Of one row in the round that has most for its time: about what a prompt's token costs."""
    return min(
        seconds / (batch * (drafts + 1))
        for batch, curve in table.verify
        for drafts, seconds in curve
    )


def _context(requests: Sequence[Request]) -> int:
    return sum(len(request.tokens) for request in requests)
