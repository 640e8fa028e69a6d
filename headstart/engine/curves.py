"""Numbers between and beyond what was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

Curve = tuple[tuple[int, float], ...]  # (size, seconds), ascending
Surface = tuple[tuple[int, Curve], ...]  # batch -> (drafts, seconds), ascending


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


def levelled(surface: Sequence[tuple[int, Curve]]) -> Surface:
    """The same in both directions."""
    result: list[tuple[int, Curve]] = []
    above: dict[int, float] = {}  # by drafts, of the larger batches
    for batch, curve in reversed(surface):
        own = [(count, min(seconds, above.get(count, seconds))) for count, seconds in curve]
        result.append((batch, level(own)))
        above |= dict(result[-1][1])
    return tuple(reversed(result))
