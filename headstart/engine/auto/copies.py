"""Which requests copy from their context in the next round, and how many tokens.

Copied drafts cost rows of the verification and no steps of the head. What they promise is known
from live rounds, by how long the match is: every round shows whether its copies would have been
right, used or not. Where the head drafts, and its drafts agree with the copy, the copy goes on
after them, and promises more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from headstart.copying.drafts import MAX_COPIED, Copy
from headstart.engine.auto.live_costs import LiveCosts, active_at
from headstart.engine.auto.rates import AcceptanceRates
from headstart.engine.options import VERIFIED
from headstart.engine.request import Request

_LIKELY = 0.5
CLEARLY = 1.02  # times the speed that another source must promise
# How often a token copied after so long a match is right, before any was seen.
_PRIORS = {2: 0.4, 3: 0.6, 4: 0.8, 5: 0.9, 6: 0.95}
_CONFIRMED_PRIOR = 0.85  # and where the head's drafts agree with it


def length_class(length: int) -> int:
    """Matches that are judged together: 3 tokens, 4 to 7, 8 to 15, 16 to 31, and more."""
    return max(2, min(length.bit_length(), 6))


@dataclass
class CopyRates:
    """How often copied tokens were right, by length of the match and what the head said."""

    _rates: dict[tuple[int, bool], AcceptanceRates] = field(default_factory=dict)
    # Of all requests together, until one has shown something new.
    _priors: dict[tuple[int, bool], list[float]] = field(default_factory=dict)

    def observe(self, request_id: str, copy: Copy, emitted: list[int], *, confirmed: bool) -> None:
        """What a request went on with, at the place that `copy` was for."""
        right = min(copy.num_right(emitted), MAX_COPIED)
        is_known = right < min(len(emitted), len(copy.tokens), MAX_COPIED)  # the next was wrong
        for kind in {False, confirmed}:
            own = self._rates.setdefault((length_class(copy.length), kind), AcceptanceRates())
            own.observe(request_id, right + is_known, right)
            self._priors.pop((length_class(copy.length), kind), None)

    def gains(self, request_id: str, copy: Copy, *, confirmed: bool = False) -> list[float]:
        """Expected tokens of each copied one: how often it and all before it are right."""
        kind = length_class(copy.length), confirmed
        own = self._rates.get(kind) or AcceptanceRates()
        if kind not in self._priors:
            first = max(_CONFIRMED_PRIOR if confirmed else 0.0, _PRIORS[kind[0]])
            self._priors[kind] = own.overall.priors(MAX_COPIED, first=first)
        # More are found than a round copies.
        return own.gains(request_id, self._priors[kind][: len(copy.tokens)])

    def forget(self, request_id: str) -> None:
        for own in self._rates.values():
            own.forget(request_id)


@dataclass(frozen=True)
class PlannedRound:
    """Drafts of a round: by the head, and copied instead of it."""

    head: dict[Request, int]
    copied: dict[Request, int] = field(default_factory=dict)
    least_gain: float = 1.0  # expected tokens from which on one more row pays
    confirmed: frozenset[Request] = frozenset()  # that copy only what the head's drafts agree with
    rows: int | None = None  # of all requests beyond the head's drafts; None: for all that copy

    @property
    def num_rows(self) -> int:
        """Of a captured round, beyond those of the head's drafts."""
        if self.rows is not None:
            return self.rows
        usual = max(self.head.values(), default=0)
        return sum(max(0, drafts - usual) for drafts in self.copied.values())


def with_copies(
    head: Mapping[Request, int],
    head_gains: Mapping[Request, Sequence[float]],
    copies: Mapping[Request, Copy],
    copy_gains: Mapping[Request, Sequence[float]],
    costs: LiveCosts,
    context: int,
) -> PlannedRound:
    """The round in which requests copy where that makes it faster; `head` are the head's drafts."""
    drafts, copied, rows = dict(head), dict[Request, int](), 0
    active = active_at(list(drafts.values()))
    tokens = sum(1 + sum(head_gains[r][:k]) for r, k in drafts.items())
    speed = tokens / costs.seconds_at(len(drafts), active, 0, context)
    for request in sorted(copies, key=lambda request: -copies[request].length):
        own, gains = drafts[request], copy_gains[request]
        without = tokens - sum(head_gains[request][:own])
        others = _without(active, own)
        best, least = 0, speed * CLEARLY
        for count in VERIFIED[1:]:  # what such rounds take was timed
            if count > len(gains):
                break
            expected = without + sum(gains[:count])
            seconds = costs.seconds_at(len(drafts), others, rows + count, context)
            if expected / seconds > least:
                best, least = count, expected / seconds
        if best:
            drafts[request], copied[request] = 0, best
            active, rows = others, rows + best
            tokens, speed = without + sum(gains[:best]), least
    # So many more at once: a single row may cost nothing where rows are computed in groups.
    more = costs.seconds_at(len(drafts), active, rows + MAX_COPIED, context)
    row_seconds = (more - costs.seconds_at(len(drafts), active, rows, context)) / MAX_COPIED
    return PlannedRound(drafts, copied, speed * row_seconds)


def _without(active: Sequence[int], drafts: int) -> list[int]:
    """Requests that draft at each depth, without one that has so many drafts."""
    fewer = [number - (depth < drafts) for depth, number in enumerate(active)]
    return [number for number in fewer if number]


def with_more_rows(
    planned: PlannedRound, copy_gains: Mapping[Request, Sequence[float]]
) -> PlannedRound:
    """The same with as many copied tokens as are more often right than wrong.

    What rounds with more rows cost is only known by them: a bad spell in which they were timed
    would keep copies short for ever.
    """
    copied = {
        request: max(count, sum(gain > _LIKELY for gain in copy_gains.get(request, ())))
        for request, count in planned.copied.items()
    }
    return replace(planned, copied=copied)


def more_copied(gains: Sequence[float], num_drafts: int, least_gain: float) -> int:
    """Copied tokens worth adding after `num_drafts` drafts that agree with them."""
    worth = takewhile(lambda gain: gain > least_gain, gains[num_drafts:])
    return sum(1 for _ in worth)
