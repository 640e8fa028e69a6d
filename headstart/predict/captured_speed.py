"""What `auto` would bring in captured rounds that also copy: its policy, played over answers.

The host plans a round before it knows what the one under way gives, and the device goes on with
copies where that agrees with them: so a copy begins a round late, here as there. Prices are those
that `auto` has on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from headstart.copying.drafts import MAX_COPIED, Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.auto.served_costs import CapturedCosts
from headstart.engine.draft_sources import AHEAD
from headstart.engine.options import MENU, EngineOptions
from headstart.engine.request import Request
from headstart.predict.auto_speed import Play, Played, RunningAnswer
from headstart.simulate.answers import GREEDY
from headstart.simulate.matches import Matches

_COPIED = (*MENU[1:], MAX_COPIED)  # drafts that a round may have where some are copied
_CONTEXT = replace(GREEDY, draft_from="context")


class _Drafts(NamedTuple):
    """Of one request in a round: how many, how many of them are the head's, and are right."""

    total: int
    of_head: int
    right: int


@dataclass(frozen=True)
class _Outcome:
    """What a round gave a request; the host learns it while the next one runs."""

    drafts: _Drafts
    accepted: int
    emitted: list[int]


def captured_speed(
    answers: Sequence[Matches], texts: Mapping[str, list[int]], costs: CapturedCosts,
    requests: int, max_drafts: int, *, with_head: bool, from_answers: int = 0,
) -> Played:  # fmt: skip
    """Drafts from the context, beside the head or alone (`draft_from: context`).

    Also from so many earlier answers.
    """
    options = EngineOptions(speculate="auto", draft_from_answers=from_answers)
    play = CapturedPlay(options, texts, costs, requests, max_drafts, with_head=with_head)
    return play.run(answers)


class CapturedPlay(Play):
    """A batch of answers that is kept full, round by round; the device drives rounds."""

    def __init__(
        self, options: EngineOptions, texts: Mapping[str, list[int]], costs: CapturedCosts,
        requests: int, max_drafts: int, *, with_head: bool,
    ):  # fmt: skip
        params = GREEDY if with_head else _CONTEXT
        super().__init__(options, costs.table, requests, max_drafts, texts, params)
        self._policy.use_rounds(costs.table, lambda count: costs.size)
        self._outcomes: dict[Request, _Outcome] = {}  # of the round under way

    def _round(self, running: Sequence[RunningAnswer]) -> float:
        assert self._copies is not None and self._policy.uniform_costs is not None
        known = {each.request: each for each in running}
        starts = {request: len(request.tokens) for request in known}
        copies = {r: copy for r in known if (copy := self._copies.found(r)) is not None}
        planned = self._policy.plan_round(list(known), len(running), copies)
        for request in known:
            self._learn(request)
        self._copies.find_all(known, lambda r: min(AHEAD, self._policy.room(r)))
        usual, most = max(planned.head.values()), max(planned.copied.values(), default=0)
        total = next((count for count in _COPIED if count >= most), MAX_COPIED) if most else 0
        drafts = {
            request: self._drafts(each, planned, copies.get(request), starts[request], total)
            for request, each in known.items()
        }
        room = self._room(len(running) * (usual + 1), planned.num_rows) if most > usual else None
        for request, fitting in _fitted(drafts, room).items():
            accepted = min(fitting.right, fitting.total)
            emitted = known[request].emit(accepted, fitting.of_head)
            self._outcomes[request] = _Outcome(fitting, accepted, emitted)
        costs = self._policy.uniform_costs
        seconds = costs.seconds(len(running), usual)
        return seconds + costs.added_seconds(len(running), usual, total, planned.num_rows)

    def _learn(self, request: Request) -> None:
        """What the host is told of the round under way."""
        outcome = self._outcomes.pop(request, None)
        if outcome is None:
            return
        of_head = min(outcome.drafts.total, outcome.drafts.of_head)
        self._policy.observe(request, of_head, min(outcome.accepted, of_head))
        assert self._copies is not None
        if (copy := self._copies.take(request)) is not None:
            self._policy.observe_copy(request, copy, outcome.emitted, confirmed=False)
        request.tokens += outcome.emitted

    def _end(self, answer: RunningAnswer) -> None:
        self._learn(answer.request)
        super()._end(answer)

    def _drafts(
        self,
        answer: RunningAnswer,
        planned: PlannedRound,
        copy: Copy | None,
        start: int,
        total: int,
    ) -> _Drafts:
        """What the device makes of a copy that was found for the text up to `start`."""
        request, leading = answer.request, answer.leading
        head = min(planned.head[request], self._max_drafts)
        alone = _Drafts(head, head, leading)
        if copy is None or request not in planned.copied:
            return alone
        came = request.tokens[start:]
        if copy.tokens[: len(came)] != came:
            return alone
        rest = Copy(copy.tokens[len(came) : len(came) + max(total, head)], copy.length)
        right, count = rest.num_right(answer.following), len(rest.tokens)
        # Drafts that are right agree; that both are wrong in the same way is not known.
        agrees = min(leading, right) >= min(head, count) and count > head
        if not count or (request in planned.confirmed and not (agrees and head)):
            return alone
        return _Drafts(count, head if agrees else 0, right)

    def _room(self, own: int, rows: int) -> int | None:
        """Rows of a pass with so many for the head's drafts and these; None where all have room."""
        sizes = (size for size, _ in self._table.passes if size >= own + rows)
        return next(sizes, own + rows) if self._table.passes else None


def _fitted(drafts: Mapping[Request, _Drafts], room: int | None) -> dict[Request, _Drafts]:
    """Drafts cut alike to the rows that there are, as `fit_drafts` cuts them on the device."""
    if room is None:
        return dict(drafts)
    most = max(own.total for own in drafts.values())
    while most and sum(min(own.total, most) + 1 for own in drafts.values()) > room:
        most -= 1
    spare = room - sum(min(own.total, most) + 1 for own in drafts.values())
    found = {}
    for request, own in drafts.items():
        more = own.total > most and spare > 0
        spare -= more
        found[request] = own._replace(total=min(own.total, most + more))
    return found
