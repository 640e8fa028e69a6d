"""What a round costs by batch size and number of drafts, as it was profiled at start.

A round is one verification and its draft steps. Where the host drives the parts of a round, both
are timed separately. A captured round is timed as a whole: all of it counts as verification, and
its draft steps add nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Curve = tuple[tuple[int, float], ...]  # (size, seconds), ascending
Surface = tuple[tuple[int, Curve], ...]  # batch -> (drafts per request, seconds), ascending


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds, by batch size, drafts per request and tokens of context."""

    verify: Surface  # with short contexts
    draft: Curve = ((1, 0.0),)  # batch -> seconds of each draft step
    start: Curve = ((1, 0.0),)  # batch -> seconds of drafting besides its steps
    context: Surface = ()  # seconds that each token of context adds, of all requests together
    catch_up: Curve = ()  # batch -> seconds that reading `window` tokens takes the head
    window: int = 1  # rounds without drafts until the head reads what it has missed
    # Rows -> seconds of a trunk pass alone, where requests may have different numbers of rows.
    passes: Curve = ()

    @property
    def menu(self) -> tuple[int, ...]:
        """Numbers of drafts that were profiled."""
        return tuple(drafts for drafts, _ in self.verify[0][1])

    def verify_seconds(self, batch: int, rows: int, context: int = 0) -> float:
        """One trunk pass over `rows` rows of `batch` requests, and the decision."""
        seconds = surface_at(self.verify, batch, rows / batch - 1)
        return seconds + context * self.token_seconds(batch, rows) if context else seconds

    def token_seconds(self, batch: int, rows: int) -> float:
        """What a token of context adds to that."""
        if not self.context:
            return 0.0
        return max(0.0, surface_at(self.context, batch, rows / batch - 1))

    def draft_seconds(self, batch: int) -> float:
        """One token drafted for each of `batch` requests; nothing for none."""
        return curve_at(self.draft, batch) if batch else 0.0

    def start_seconds(self, batch: int) -> float:
        """What drafting takes besides its steps, if any request drafts."""
        return curve_at(self.start, batch) if batch else 0.0

    def catch_up_seconds(self, batch: int) -> float:
        """What a round without drafts leaves the head to read later."""
        return curve_at(self.catch_up, batch) / self.window if self.catch_up else 0.0

    def more_rows_seconds(self, rows: int, more: int) -> float:
        """What so many rows more add to a pass of `rows`.

        A pass has one of the sizes that were timed. Where none were, a row counts as a request
        without drafts.
        """
        wide, usual = map(self._pass_seconds, (rows + more, rows))
        return max(0.0, wide - usual)

    def _pass_seconds(self, rows: int) -> float:
        if not self.passes:
            return self.verify_seconds(rows, rows)
        at = bisect_left(self.passes, (rows,))
        return self.passes[at][1] if at < len(self.passes) else curve_at(self.passes, rows)

    def round_seconds(self, batch: int, drafts: int, context: int = 0) -> float:
        """A round in which every request has the same number of drafts."""
        verification = self.verify_seconds(batch, batch * (drafts + 1), context)
        drafting = self.start_seconds(batch) if drafts else 0.0
        return verification + drafting + drafts * self.draft_seconds(batch)


# Where there is no memory to measure anything, a draft costs what it could save at best.
NEVER_PAYS = RoundCosts(((1, ((0, 1.0),)),), ((1, 1.0),))


def curve_at(curve: Sequence[tuple[int, float]], size: float) -> float:
    """Between two points, or beyond the last one, along the line through the nearest two."""
    if len(curve) == 1 or size <= curve[0][0]:
        return curve[0][1] * (max(1.0, size / curve[0][0]) if curve[0][0] else 1.0)
    at = min(max(bisect_left(curve, (size,)), 1), len(curve) - 1)
    (low, low_cost), (high, high_cost) = curve[at - 1], curve[at]
    slope = (high_cost - low_cost) / (high - low)
    if size > high:
        slope = max(slope, 0.0)  # noise must not make large batches free
    return low_cost + slope * (size - low) if size <= high else high_cost + slope * (size - high)


def surface_at(surface: Surface, batch: int, drafts: float) -> float:
    """The same in both directions."""
    at = min(bisect_left(surface, (batch,)), len(surface) - 1)
    near = surface[max(0, at - 1) : at + 1]
    return curve_at([(size, curve_at(curve, drafts)) for size, curve in near], batch)


def level(curve: Sequence[tuple[int, float]]) -> Curve:
    """Noise only adds: a smaller round costs no more than a larger one."""
    least = accumulate(reversed([seconds for _, seconds in curve]), min)
    return tuple((size, seconds) for (size, _), seconds in zip(curve, [*least][::-1], strict=True))


def level_surface(surface: Sequence[tuple[int, Curve]]) -> Surface:
    """The same in both directions."""
    result: list[tuple[int, Curve]] = []
    above: dict[int, float] = {}  # by drafts, of the larger batches
    for batch, curve in reversed(surface):
        own = [(count, min(seconds, above.get(count, seconds))) for count, seconds in curve]
        result.append((batch, level(own)))
        above |= dict(result[-1][1])
    return tuple(reversed(result))
