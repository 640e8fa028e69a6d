"""What drafts would bring where the host drives rounds, by what was timed of an engine's rounds.

The policy that is played begins with the costs that an engine profiles at its start, and observes
of each round what an engine would. So where a profile is off, it chooses as an engine would, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import linear_regression

from headstart.engine.auto.costs import RoundCosts, curve_at
from headstart.engine.auto.served_costs import RoundTimes
from headstart.engine.options import EngineOptions
from headstart.predict.auto_speed import Play, Played, RoundParts
from headstart.sampling.params import DraftFrom
from headstart.simulate.cost import Costs
from headstart.simulate.matches import Matches


def host_speed(
    answers: Sequence[Matches], texts: Mapping[str, list[int]], times: RoundTimes, max_drafts: int,
    source: DraftFrom, from_answers: int = 0,
) -> Played:  # fmt: skip
    """By the head ("head"), copies ("context") or both ("auto").

    The speed is that over an engine without a head; deciding counts. `texts` are token ids by
    record; copies come from so many earlier answers, too.
    """
    own_texts = None if source == "head" else texts
    return HostPlay(times, source, max_drafts, own_texts, from_answers).run(answers)


class HostPlay(Play):
    """A batch of answers in an engine that drafts from one source."""

    def __init__(
        self, times: RoundTimes, source: DraftFrom, max_drafts: int,
        texts: Mapping[str, list[int]] | None, from_answers: int,
    ):  # fmt: skip
        assert times.host is not None
        self._times, self._host, self._own = times, times.host, times.host.sources[source]
        table, has_head = RoundCosts(((times.requests, self._own.rounds),)), source != "context"
        if has_head:
            table = _with_head(table, times, times.requests, max_drafts)
        options = EngineOptions(
            speculate="auto" if has_head else "context", draft_from_answers=from_answers
        )
        known = replace(table, verify=((times.requests, self._own.profiled),))
        most = max_drafts if has_head else 0
        super().__init__(options, table, times.requests, most, texts, known=known)

    def _plain_seconds(self, context: int) -> float:
        return self._times.round_seconds(self._requests, 0) + self._host.added(0, context)

    def _parts(self, size: int, rows: int, context: int, *, could_copy: bool) -> RoundParts:
        drafts, choosing = rows / size - 1, self._own.deciding
        deciding = choosing.copying if could_copy else choosing.usual
        seconds = self._table.verify_seconds(size, rows) + self._host.added(drafts, context)
        return RoundParts(
            seconds + deciding,
            curve_at(self._own.verify, drafts) * seconds,
            curve_at(self._own.besides, drafts) * seconds + deciding,
        )


def _with_head(known: RoundCosts, costs: Costs, requests: int, max_drafts: int) -> RoundCosts:
    """The same costs with what the head's steps take beside their rows: nearly a line."""
    drafts = range(1, max_drafts + 1)
    beside = [costs.round_seconds(requests, k) - known.round_seconds(requests, k) for k in drafts]
    step, start = max(0.0, beside[0]), 0.0
    if max_drafts > 1:
        step, start = (max(0.0, each) for each in linear_regression(drafts, beside))
    return RoundCosts(known.verify, ((requests, step),), ((requests, start),))
