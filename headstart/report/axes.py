"""Axes: a range, round ticks on it, and labels that tell the ticks apart.

Only finite numbers are placed; `usable` says which are. Ticks are multiples of 1, 2 or 5 times a
power of ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond, differences overflow or round to nothing
_SAME = 1e-9  # a range this small beside its values is one value
_NUM_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """A range of values and where to mark it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def share(self, value: float) -> float:
        """Where a value lies on the axis: 0 at its low end, 1 at its high end."""
        return (value - self.low) / (self.high - self.low)


def usable(value: float) -> bool:
    """Whether a value has a place on an axis (NaN and infinities have none)."""
    return math.isfinite(value) and abs(value) <= _LARGEST


def axis(
    values: Iterable[float], *, from_zero: bool = False, whole: bool = False, snap: bool = True
) -> Axis:
    """An axis for some values; those that are not usable are left out.

    `from_zero` puts zero on it (bars), `whole` allows no tick between integers, `snap` makes it
    begin and end at a tick.
    """
    kept = [value if abs(value) > _SMALLEST else 0.0 for value in values if usable(value)]
    if from_zero or not kept:
        kept.append(0.0)
    low, high = _spread(min(kept), max(kept), from_zero=from_zero or kept == [0.0], whole=whole)
    step, exponent = _step((high - low) / _NUM_TICKS)
    if whole and step < 1:
        step, exponent = 1.0, 0
    # A rounding error of the division must not cost the tick at the end.
    first, last = (low / step, high / step)
    if snap:
        begin, end = math.floor(first + 1e-6), math.ceil(last - 1e-6)
    else:
        begin, end = math.ceil(first - 1e-6), math.floor(last + 1e-6)
    ticks = tuple(_rounded(i * step, exponent) for i in range(begin, end + 1))
    if snap:
        low, high = ticks[0], ticks[-1]
    return Axis(low, high, ticks, tick_labels(ticks, exponent))


def tick_labels(ticks: tuple[float, ...], exponent: int) -> tuple[str, ...]:
    """Labels with the digits that a step of about 10^exponent needs, and no more."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    lead = math.floor(math.log10(largest)) if largest else 0
    is_plain = -4 < lead < 6 or (lead >= 6 and lead - exponent > 4)
    if is_plain:
        return tuple(f"{tick:,.{max(0, -exponent)}f}" for tick in ticks)
    decimals = max(0, lead - exponent)
    return tuple(f"{tick / 10.0**lead:.{decimals}f}e{lead}" if tick else "0" for tick in ticks)


def _spread(low: float, high: float, *, from_zero: bool, whole: bool) -> tuple[float, float]:
    """The same range, or one around a single value, which would have no length."""
    size = max(abs(low), abs(high))
    if high - low > _SAME * size:
        return low, high
    if size == 0.0:
        return (0.0, 1.0) if from_zero else (-1.0, 1.0)
    around = max(size / 10, 1.0) if whole else size / 10
    return low - around, high + around


def _step(about: float) -> tuple[float, int]:
    """The round step nearest to `about`, by ratio, and its power of ten."""
    exponent = math.floor(math.log10(about))
    for factor, following in ((1, 2), (2, 5), (5, 10)):
        if about < math.sqrt(factor * following) * 10.0**exponent:
            return factor * 10.0**exponent, exponent
    return 10.0 ** (exponent + 1), exponent + 1


def _rounded(value: float, exponent: int) -> float:
    """0.3, not 0.30000000000000004."""
    return round(value, -exponent) if exponent < 0 else value
