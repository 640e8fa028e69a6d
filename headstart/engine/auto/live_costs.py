"""Costs as profiled, corrected by what rounds really take, and the drafts that pay by them.

Drafts are chosen in one of two ways. Where the host drives rounds, each request has its own K,
and every row and draft step costs something. A captured round has one K for all requests, from a
menu: requests that draft less are masked inside it, which saves nothing.

`corrections.py` says how profiled seconds are corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from headstart.engine.auto.corrections import DeviceCorrections, HostCorrections
from headstart.engine.auto.costs import RoundCosts

Gains = Sequence[Sequence[float]]  # by request: expected tokens of its drafts, by depth

_OVERHEAD_SHARE = 0.05  # of a new observation of what a round takes besides its passes,
_MOST_OVERHEAD = 3.0  # times what was known: a pause of the machine is not a cost
_STAYING = 0.02  # of the speed, that another K must promise more than that of the last round


@dataclass(frozen=True)
class Choice:
    """Drafts of each request under `auto`, and the speed that they promise."""

    drafts: list[int]
    speed: float  # tokens per second,
    plain_speed: float  # without drafts,
    full_speed: float  # with all that could be made
    break_even: float  # how often one draft per request must be right to pay


class _Expected(NamedTuple):
    """What a round that could be run would give and take."""

    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class LiveCosts:
    """Costs of one kind of rounds: every request with its own K, or all with the same."""

    def __init__(
        self,
        table: RoundCosts,
        *,
        uniform: bool = False,
        captured_size: Callable[[int], int] = int,
    ):
        """`uniform`: all requests of a round have one K, from the menu of the table.

        `captured_size` tells how large the captured round for a number of requests is.
        """
        self.uniform = uniform
        self.use(table)
        self.captured_size = captured_size
        # A device's own clock can be trusted; that of the host has bad spells.
        self._corrections: DeviceCorrections | HostCorrections = (
            DeviceCorrections() if uniform else HostCorrections()
        )
        self._overhead = 0.0  # seconds of a round besides its passes, where the host drives it
        # A draft that was not made must promise this much more, one that was this much less. With
        # one K for all it is the K that stays, by the speed of whole rounds.
        self.hysteresis = 0.0 if uniform else 0.05
        self._last_k = 0

    def use(self, table: RoundCosts) -> None:
        """Costs as profiled; every round asks for many of the same."""
        self.table = table
        self._verify, self._draft = cache(table.verify_seconds), cache(table.draft_seconds)
        self._start, self._token = cache(table.start_seconds), cache(table.token_seconds)

    def seconds(self, batch: int, num_drafts: int, context: int = 0) -> float:
        """A round in which every request drafts as much; `context` counts tokens of all requests.

        A round without drafts includes its share of the head's catching up later.
        """
        size = self.captured_size(batch)
        seconds = self.verify_seconds(size, size * (num_drafts + 1), context)
        if not num_drafts:
            return seconds + self.table.catch_up_seconds(size) + self._overhead
        return seconds + self._drafting([size] * num_drafts) + self._overhead

    def seconds_of(self, drafts: Sequence[int], context: int = 0) -> float:
        """A round in which each request has its own number of drafts."""
        if self.uniform:
            return self.seconds(len(drafts), max(drafts), context)
        return self.seconds_with(drafts, 0, context)

    def seconds_with(self, drafts: Sequence[int], more_rows: int, context: int = 0) -> float:
        """The same where the host drives it, with rows of drafts that the head does not make."""
        return self.seconds_at(len(drafts), active_at(drafts), more_rows, context)

    def seconds_at(
        self, batch: int, active: Sequence[int], more_rows: int, context: int = 0
    ) -> float:
        """The same by how many of the requests draft at each depth, all of them at least one."""
        verification = self.verify_seconds(batch, batch + sum(active) + more_rows, context)
        return verification + self._drafting(active) + self._overhead

    def added_seconds(self, batch: int, drafts: int, total: int, rows: float) -> float:
        """What so many rows add to a captured round, for more drafts than the head makes.

        `total` of each request that copies at most; the head reads later what they give. Where
        requests cannot have different numbers of rows all have as many.
        """
        more = total - drafts
        if more <= 0 or not rows:
            return 0.0
        added = math.ceil(rows) if self.table.passes else batch * more
        read = (total + 1) * self.table.catch_up_seconds(batch)
        return self.table.more_rows_seconds(batch * (drafts + 1), added) + read

    def verify_seconds(self, batch: int, rows: int, context: int = 0) -> float:
        factor = self._corrections.factor(self._verify_key(batch, rows))
        seconds = self._verify(batch, rows)
        if context:
            seconds += context * self._token(batch, rows)
        return seconds * factor

    def draft_seconds(self, batch: int) -> float:
        return self._draft(batch) * self._corrections.factor(self._draft_key(batch))

    def start_seconds(self, batch: int) -> float:
        return self._start(batch) * self._corrections.factor(self._draft_key(batch))

    def _drafting(self, active: Sequence[int]) -> float:
        """Seconds of all draft steps; `active` are the numbers of requests at each depth."""
        return sum(self._step(active, depth) for depth in range(len(active)))

    def _step(self, active: Sequence[int], depth: int) -> float:
        """The first step is a little longer than others."""
        start = 0.0 if depth else self.start_seconds(active[0])
        return start + self.draft_seconds(active[depth])

    def observe_verify(self, batch: int, rows: int, seconds: float, context: int = 0) -> None:
        """What a verification took, or a captured round in which the head had not to catch up."""
        predicted = self.table.verify_seconds(batch, rows, context)
        self._corrections.observe(self._verify_key(batch, rows), seconds / predicted)

    def observe_drafts(self, active: Sequence[int], seconds: float) -> None:
        """What drafting took; `active` are the numbers of requests at each depth."""
        start = self.table.start_seconds(active[0])
        predicted = start + sum(self.table.draft_seconds(batch) for batch in active)
        self._corrections.observe(self._draft_key(active[0]), seconds / predicted)

    def observe_overhead(self, seconds: float) -> None:
        """What a round took that the host drove, besides verification and drafting."""
        share = _OVERHEAD_SHARE if self._overhead else 1.0
        least = min(seconds, _MOST_OVERHEAD * self._overhead) if self._overhead else seconds
        self._overhead += share * (least - self._overhead)

    def fade(self) -> None:
        """Corrections that have not been seen again for a while count for less."""
        self._corrections.fade()

    def _verify_key(self, batch: int, rows: int) -> tuple[str, int, int]:
        return "verify", self._size_class(batch), round(rows / batch) - 1

    def _draft_key(self, batch: int) -> tuple[str, int, int]:
        return "draft", self._size_class(batch), 0

    def _size_class(self, batch: int) -> int:
        """Batches that are corrected together: captured sizes are few, others many."""
        return batch if self.uniform else batch.bit_length()

    def best(self, gains: Gains, fixed: Gains, context: int) -> Choice:
        """The drafts that give the most tokens per second.

        `gains` are of requests whose K is free, `fixed` of those whose K is given; `context`
        counts the tokens of all of them.
        """
        batch = len(gains) + len(fixed)
        if self.uniform:
            rounds = self._with_one_k(gains, fixed, context)
            best = self._staying(rounds)
            drafts = [self.table.menu[best]] * len(gains)
        else:
            ranked = _ranked(gains)
            rounds = self._with_own_ks(ranked, len(gains), fixed, context)
            best = _fastest(rounds)
            drafts = [0] * len(gains)
            for _, _, request in ranked[:best]:
                drafts[request] += 1
        plain, one = (self.seconds(batch, drafts, context) for drafts in (0, 1))
        return Choice(
            drafts, rounds[best].speed, rounds[0].speed, rounds[-1].speed, one / plain - 1
        )

    def _with_own_ks(
        self, ranked: Sequence[tuple[float, int, int]], num_free: int, fixed: Gains, context: int
    ) -> list[_Expected]:
        """Rounds with none, one, two ... of the ranked drafts.

        Tokens of requests with a fixed K are the same in all of these rounds, and not counted.
        """
        batch = num_free + len(fixed)
        rows = batch + sum(map(len, fixed))
        deepest = max([*map(len, fixed), *(depth + 1 for _, depth, _ in ranked)], default=0)
        active = [sum(len(chain) > depth for chain in fixed) for depth in range(deepest)]
        tokens, drafting = float(num_free), self._drafting(active)
        fixed_part = self._overhead
        rounds = [
            _Expected(tokens, self.verify_seconds(batch, rows, context) + drafting + fixed_part)
        ]
        for gain, depth, _ in ranked:
            tokens += gain
            rows += 1
            drafting -= self._step(active, depth)
            active[depth] += 1
            drafting += self._step(active, depth)
            seconds = self.verify_seconds(batch, rows, context) + drafting + fixed_part
            rounds.append(_Expected(tokens, seconds))
        return rounds

    def _with_one_k(self, gains: Gains, fixed: Gains, context: int) -> list[_Expected]:
        """Rounds with each K of the menu; a round has at least the drafts of a fixed K."""
        batch, least = len(gains) + len(fixed), max(map(len, fixed), default=0)
        tokens, by_depth = float(batch + sum(map(sum, fixed))), _by_depth(gains)
        return [
            _Expected(tokens + sum(by_depth[:k]), self.seconds(batch, max(k, least), context))
            for k in self.table.menu
        ]

    def _staying(self, rounds: Sequence[_Expected]) -> int:
        """The fastest round, unless that with the K of the last one is nearly as fast.

        A change costs something, and two numbers that are worth the same would take turns.
        """
        menu = self.table.menu
        best, last = _fastest(rounds), menu.index(self._last_k)
        is_another = rounds[best].seconds != rounds[last].seconds  # not so beside a larger fixed K
        if is_another and rounds[best].speed < (1 + _STAYING) * rounds[last].speed:
            best = last
        self._last_k = menu[best]
        return best


def active_at(drafts: Sequence[int]) -> list[int]:
    """How many requests draft at each depth."""
    return [sum(k > depth for k in drafts) for depth in range(max(drafts, default=0))]


def _fastest(rounds: Sequence[_Expected]) -> int:
    speeds = [each.speed for each in rounds]
    return speeds.index(max(speeds))


def _ranked(gains: Gains) -> list[tuple[float, int, int]]:
    """(expected tokens, depth from 0, request) of every draft that could be made, best first."""
    drafts = [
        (gain, depth, at) for at, chain in enumerate(gains) for depth, gain in enumerate(chain)
    ]
    return sorted(drafts, key=lambda draft: (-draft[0], draft[1]))


def _by_depth(gains: Gains) -> list[float]:
    """Expected tokens of all requests, by depth."""
    sums = [0.0] * max(map(len, gains), default=0)
    for chain in gains:
        for depth, gain in enumerate(chain):
            sums[depth] += gain
    return sums
