"""What captured rounds cost, and which K pays by that.

A captured round costs what its number of seats and its largest K say: seats that draft less are
masked inside it, which saves nothing. Keys and values are read once per round whatever K is, so
long contexts add about the same to every K, and make drafts more attractive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.engine.corrections import Corrections
from headstart.engine.curves import Curve, Surface, curve_at, surface_at
from headstart.engine.draft_choice import Choice, Promises

_STAYING = 0.02  # of the speed, that another K must promise more than the last one


@dataclass(frozen=True)
class RoundTable:
    """Seconds of rounds with short contexts, and what else they depend on."""

    rounds: Surface  # seats -> (K, seconds)
    context: Surface = ()  # seats -> (K, seconds per token of context, all seats together)
    catch_up: Curve = ()  # seats -> seconds that a full window of tokens adds for the head
    window: int = 1  # rounds without drafts from one such catching up to the next

    @property
    def menu(self) -> tuple[int, ...]:
        return tuple(drafts for drafts, _ in self.rounds[0][1])

    @property
    def row_seconds(self) -> float:
        """Of one row in the round that has most for its time: about what a prompt's token costs."""
        return min(
            seconds / (seats * (drafts + 1))
            for seats, curve in self.rounds
            for drafts, seconds in curve
        )

    def seconds(self, seats: int, drafts: int, context: int) -> float:
        result = surface_at(self.rounds, seats, drafts)
        if self.context:
            result += context * max(0.0, surface_at(self.context, seats, drafts))
        return result

    def catch_up_seconds(self, seats: int) -> float:
        """What a round without drafts adds to the head's debt."""
        return curve_at(self.catch_up, seats) / self.window if self.catch_up else 0.0


class LiveRounds:
    """Rounds as profiled, times what live rounds say about them."""

    hysteresis = 0.0  # by whole rounds instead: the K of the last one stays

    def __init__(self, table: RoundTable, bucket: Callable[[int], int] = int):
        """`bucket` tells how many seats the captured round for so many requests has."""
        self._table, self._bucket = table, bucket
        self._corrections = Corrections(doubt=1, fading=0.95)  # a device's clock has no bad spells
        self._last = 0  # K of the round before

    def seconds(self, batch: int, num_drafts: int, context: int) -> float:
        """One round, its share of the head's catching up included."""
        seconds = self._alone(batch, num_drafts, context)
        catch_up = 0.0 if num_drafts else self._table.catch_up_seconds(self._bucket(batch))
        return seconds + catch_up

    def headless_seconds(self, batch: int, context: int) -> float:
        """One round in which nobody has a head that would have to catch up."""
        return self._alone(batch, 0, context)

    def _alone(self, batch: int, num_drafts: int, context: int) -> float:
        seats = self._bucket(batch)
        seconds = self._table.seconds(seats, num_drafts, context)
        return seconds * self._corrections.factor((seats, num_drafts))

    def round_seconds(self, batch: int, num_drafts: int) -> float:
        return self.seconds(batch, num_drafts, context=0)

    @property
    def row_seconds(self) -> float:
        return self._table.row_seconds

    def prospect(self, chain: Sequence[float], batch: int, context: int) -> float:
        """Speed of the best K above 0 over that without heads, which need not catch up.

        Everybody's drafts promise `chain`.
        """
        menu = [drafts for drafts in self._table.menu if 0 < drafts <= len(chain)]
        plain = self.headless_seconds(batch, context)
        speeds = [
            (1 + sum(chain[:drafts])) * plain / self.seconds(batch, drafts, context)
            for drafts in menu
        ]
        return max(speeds, default=0.0)

    def observe(self, seats: int, num_drafts: int, context: int, seconds: float) -> None:
        """A round in which the head had nothing to catch up with."""
        predicted = self._table.seconds(seats, num_drafts, context)
        self._corrections.observe((seats, num_drafts), seconds / predicted)

    def fade(self) -> None:
        self._corrections.fade()

    def best(self, promises: Promises, fixed: Promises, context: int) -> Choice:
        """The K of the round that gives most tokens per second, of all seats together.

        Unless that of the round before gives nearly as many: a change costs, and two numbers
        that are worth the same would take turns.
        """
        batch = len(promises) + len(fixed)
        tokens = float(batch + sum(map(sum, fixed)))
        least = max(map(len, fixed), default=0)
        gains = _by_depth(promises)
        costs = {k: self.seconds(batch, max(k, least), context) for k in self._table.menu}
        speeds = {k: (tokens + sum(gains[:k])) / seconds for k, seconds in costs.items()}
        best, last = max(speeds, key=lambda drafts: speeds[drafts]), self._last
        is_another = costs[best] != costs.get(last)  # or others draft so much anyway
        if is_another and speeds[best] < (1 + _STAYING) * speeds.get(last, 0.0):
            best = last
        self._last = best
        plain, one = (self.seconds(batch, drafts, context) for drafts in (0, 1))
        return Choice(
            [best] * len(promises), speeds[best], speeds[0], speeds[max(speeds)], one / plain - 1
        )


def _by_depth(promises: Promises) -> Sequence[float]:
    """Expected tokens of all requests, by depth."""
    sums = [0.0] * max(map(len, promises), default=0)
    for chain in promises:
        for depth, gain in enumerate(chain):
            sums[depth] += gain
    return sums
