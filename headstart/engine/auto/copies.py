"""Which requests copy from their context in the next round, and how many tokens.

Copied drafts cost rows of the verification and no steps of the head. What they promise is known
from live rounds, by how long the match is: every round shows whether its copies would have been
right, used or not. Where the head drafts, and its drafts agree with the copy, the copy goes on
after them, and promises more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from headstart.copying.drafts import MAX_COPIED, Copy
from headstart.engine.auto.live_costs import LiveCosts, active_at
from headstart.engine.auto.rates import AcceptanceRates
from headstart.engine.request import Request

_COUNTS = (1, 2, 3, 5, 8, 12, MAX_COPIED)  # copied tokens that are considered
_ROUND_COUNTS = (8, MAX_COPIED)  # more than the head drafts, in captured rounds: few programs
_LIKELY = 0.5
_CLEARLY = 1.02  # times the speed that another source must promise
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

    def observe(self, request_id: str, copy: Copy, emitted: list[int], *, confirmed: bool) -> None:
        """What a request went on with, at the place that `copy` was for."""
        right = min(copy.num_right(emitted), MAX_COPIED)
        is_known = right < min(len(emitted), len(copy.tokens), MAX_COPIED)  # the next was wrong
        for kind in {False, confirmed}:
            own = self._rates.setdefault((length_class(copy.length), kind), AcceptanceRates())
            own.observe(request_id, right + is_known, right)

    def gains(self, request_id: str, copy: Copy, *, confirmed: bool = False) -> list[float]:
        """Expected tokens of each copied one: how often it and all before it are right."""
        kind = length_class(copy.length)
        own = self._rates.get((kind, confirmed)) or AcceptanceRates()
        prior = _CONFIRMED_PRIOR if confirmed else _PRIORS[kind]
        depths = min(len(copy.tokens), MAX_COPIED)  # more are found than a round copies
        priors = own.overall.priors(depths, first=max(prior, _PRIORS[kind]))
        return own.gains(request_id, priors)

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
        best, least = 0, speed * _CLEARLY
        for count in _COUNTS:
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


def round_with_copies(
    head: Mapping[Request, int],
    head_gains: Mapping[Request, Sequence[float]],
    copy_gains: Mapping[Request, Sequence[float]],
    agreed_gains: Mapping[Request, Sequence[float]],
    seconds: Callable[[int, int], float],
) -> PlannedRound:
    """Which requests copy in a captured round, in which all that copy have as many rows.

    Those whose copy promises less than their head copy only what the head's drafts agree with; what
    that promises is in `agreed_gains`. `seconds`: of a round with so many drafts of so many
    requests that copy; in rows that the head's drafts have in any case, copies cost nothing.
    """
    tokens = {r: sum(head_gains[r][:k]) for r, k in head.items()}
    usual, without = max(head.values(), default=0), len(head) + sum(tokens.values())
    best, speed = PlannedRound(dict(head)), without / seconds(usual, 0)
    clearly = _CLEARLY * speed
    for total in (usual, *(count for count in _ROUND_COUNTS if count > usual)):
        more = {r: sum(gains[:total]) - tokens[r] for r, gains in copy_gains.items()}
        sure = [r for r, gain in more.items() if gain > 0]
        unsure = frozenset(more) - frozenset(sure)
        gain = sum(more[r] for r in sure)
        behind = sum(
            _behind(head_gains[r][: head[r]], copy_gains[r], agreed_gains[r], total) for r in unsure
        )
        for given, found in ((sure, gain), (list(more), gain + behind)):
            expected = (without + found) / seconds(total, len(given))
            least = max(speed, clearly) if total > usual else speed
            if total and given and expected > least:
                copied = dict.fromkeys(given, total)
                best = PlannedRound(dict(head), copied, confirmed=unsure & frozenset(given))
                speed = expected
    return best


def _behind(
    head: Sequence[float], copied: Sequence[float], agreed: Sequence[float], total: int
) -> float:
    """Expected tokens of a copy that goes on after the head's drafts, all of which are right."""
    drafts = len(head)
    if not 0 < drafts < len(copied):
        return 0.0
    return min(head[-1], copied[drafts - 1]) * sum(agreed[drafts:total]) / agreed[drafts - 1]


def more_copied(gains: Sequence[float], num_drafts: int, least_gain: float) -> int:
    """Copied tokens worth adding after `num_drafts` drafts that agree with them."""
    worth = takewhile(lambda gain: gain > least_gain, gains[num_drafts:])
    return sum(1 for _ in worth)
