"""Which requests copy in a captured round, and how many rows it has for their drafts.

All that copy may have as many drafts. A round is launched before the one under way has ended, and
of the requests that copy some will have come to the end of what they copy by then. So a round has
rows for as many as are expected to go on, and where more do the device cuts the drafts of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from headstart.copying.drafts import MAX_COPIED, Copy
from headstart.engine.auto.copies import CLEARLY, CopyRates, PlannedRound
from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.request import Request

_COUNTS = (8, MAX_COPIED)  # drafts, more than the head makes: few programs


class Promise(NamedTuple):
    """What a request may expect if it copies."""

    gains: Sequence[float]  # tokens of each copied draft,
    agreed: Sequence[float]  # and where the head's drafts agree with the copy
    going: float = 1.0  # how likely the text goes on with the copy until the round begins


class CopiedRounds:
    """Plans captured rounds one after another; knows what the one under way copies."""

    def __init__(self, rates: CopyRates):
        self._rates = rates
        self._under_way: dict[Request, int] = {}  # drafts of those that copy for sure

    def clear(self) -> None:
        """Nothing is copied in the next round."""
        self._under_way = {}

    def forget(self, request: Request) -> None:
        self._under_way.pop(request, None)

    def plan(
        self, head: Mapping[Request, int], head_gains: Mapping[Request, Sequence[float]],
        copies: Mapping[Request, Copy], costs: LiveCosts, context: int,
    ) -> PlannedRound:  # fmt: skip
        """The round in which requests copy where that makes it faster."""
        batch, most = len(head), max(head.values())
        usual = costs.seconds(batch, most, context) if costs.uniform else 0.0

        def seconds(drafts: int, rows: float) -> float:
            if costs.uniform:
                return usual + costs.added_seconds(batch, most, drafts, rows)
            return costs.seconds_with([0] * batch, batch * drafts)

        promises = {request: self._promise(request, copy) for request, copy in copies.items()}
        own, passes = batch * (most + 1), costs.table.passes
        sizes = [rows - own for rows, _ in passes if rows > own] if passes else None
        planned = round_with_copies(head, head_gains, promises, seconds, sizes)
        self._under_way = {
            r: drafts for r, drafts in planned.copied.items() if r not in planned.confirmed
        }
        return planned

    def _promise(self, request: Request, copy: Copy) -> Promise:
        gains = self._rates.gains(request.id, copy)
        agreed = self._rates.gains(request.id, copy, confirmed=True)
        # The round under way gives its drafts and one token more, if all of them are right.
        until = min(self._under_way.get(request, 0), len(gains) - 1)
        return Promise(gains, agreed, gains[until])


def round_with_copies(
    head: Mapping[Request, int],
    head_gains: Mapping[Request, Sequence[float]],
    promises: Mapping[Request, Promise],
    seconds: Callable[[int, float], float],
    sizes: Sequence[int] | None = None,
) -> PlannedRound:
    """The fastest round, in which some requests copy, or none.

    Those whose copy promises less than their head copy only what the head's drafts agree with.
    `seconds`: of a round with up to so many drafts of a request that copies, and so many rows
    beyond those of the head's drafts, in which copies cost nothing. `sizes`: how many rows beyond
    those a pass may have; None where a round has rows for all.
    """
    tokens = {r: sum(head_gains[r][:k]) for r, k in head.items()}
    usual, without = max(head.values(), default=0), len(head) + sum(tokens.values())
    best, speed = PlannedRound(dict(head)), without / seconds(usual, 0)
    clearly = CLEARLY * speed
    for total in (usual, *(count for count in _COUNTS if count > usual)):
        sure = {r: p for r, p in promises.items() if sum(p.gains[:total]) > tokens[r]}
        unsure = {r: p for r, p in promises.items() if r not in sure}
        alone = [_alone(own, tokens[r], total) for r, own in sure.items()]
        behind = [_behind(own, head_gains[r][: head[r]], total) for r, own in unsure.items()]
        for given, groups in (sure, alone), (promises, [*alone, *behind]):
            if not (total and given):
                continue
            group = _together(groups)
            least = max(speed, clearly) if total > usual else speed
            for rows in _row_counts(group.copying * (total - usual), sizes):
                drafts = usual + rows / group.copying if group.copying else total
                expected = (without + group.gain(drafts)) / seconds(total, rows)
                if expected > least:
                    copied = dict.fromkeys(given, total)
                    confirmed = frozenset(unsure) & frozenset(given)
                    best = PlannedRound(dict(head), copied, 1.0, confirmed, math.ceil(rows))
                    least = speed = expected
    return best


class _Group(NamedTuple):
    """Requests that may copy in a round."""

    copying: float  # how many are expected to
    gains: Sequence[float]  # tokens beyond those of the head, with 0, 1, ... drafts of each

    def gain(self, drafts: float) -> float:
        """With so many drafts of each on average."""
        whole = min(int(drafts), len(self.gains) - 2)
        return self.gains[whole] + (drafts - whole) * (self.gains[whole + 1] - self.gains[whole])


def _together(groups: Sequence[_Group]) -> _Group:
    gains = [sum(own) for own in zip(*(group.gains for group in groups), strict=True)]
    return _Group(sum(group.copying for group in groups), gains)


def _alone(own: Promise, of_head: float, total: int) -> _Group:
    """A request that copies instead of the head's drafts, which promise so many tokens."""
    gains = own.gains[:total]
    tokens = [own.going * (sum_ - of_head) for sum_ in accumulate(gains, initial=0.0)]
    return _Group(own.going, tokens + tokens[-1:] * (total - len(gains)))


def _behind(own: Promise, head: Sequence[float], total: int) -> _Group:
    """One whose copy goes on after the head's drafts, where it agrees with all of them."""
    drafts = len(head)
    if not 0 < drafts < len(own.gains):
        return _Group(0.0, [0.0] * (total + 1))
    copying = own.going * min(head[-1], own.gains[drafts - 1])
    share = copying / own.agreed[drafts - 1]
    more = own.agreed[drafts:total]
    tokens = [0.0] * drafts + [share * sum_ for sum_ in accumulate(more, initial=0.0)]
    return _Group(copying, tokens + tokens[-1:] * (total - drafts - len(more)))


def _row_counts(wanted: float, sizes: Sequence[int] | None) -> list[float]:
    """Rows for all that are expected to copy, or fewer that fill a pass."""
    if sizes is None:
        return [wanted]
    fewer: list[float] = [rows for rows in sizes if rows < wanted]
    return [*fewer, wanted] if wanted <= max(sizes, default=0) else fewer
