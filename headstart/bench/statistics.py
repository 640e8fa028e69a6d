"""Ratios between two arms of a measurement, with 95 % intervals.

Every figure that is compared is a ratio of sums over requests: tokens per second is tokens over
seconds, a mean is a sum over a count. Intervals are studentised bootstrap intervals of the log
ratio: requests are drawn again, in pairs where both arms answered the same ones. A machine that is
slower for a while slows all requests of that while, which requests alone cannot show: with three
repeats or more their spread is looked at too, and counts where it is notably larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

NUM_DRAWS = 2000
_SEED = 20250917
FEWEST_REPEATS, _FEWEST_DRAWN = 3, 6
# Repeats whose standard error is this many times the requests' show noise of their own. Less would
# make intervals too wide where there is none, more would miss it.
_NOTABLY = 1.4
# Student's 97.5 % points for 1 to 9 degrees of freedom; beyond, a series in 1/degrees.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_WIDEST = 50.0  # of a log ratio: two requests that have little in common
NORMAL = 1.959964  # 97.5 % point
_SERIES = (2.372271, 2.822513, 2.555886)


@dataclass(frozen=True)
class Sample:
    """What one request adds to a ratio of sums: `amount` above, `per` below."""

    key: str  # the same in both arms for the same request
    repeat: int
    amount: float
    per: float = 1.0


@dataclass(frozen=True)
class Ratio:
    """The other arm's figure over the base's; without an interval where nothing can be said."""

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = "none"  # requests or repeats: the units whose spread gives the interval
    num_units: int = 0
    is_paired: bool = False
    # How often chance alone would go so far from 1, either way; under 0.05 where 1 is outside of
    # the interval. For corrections where many ratios are judged at once.
    p_value: float | None = None

    @property
    def is_noise(self) -> bool | None:
        """Whether no difference is as good an explanation; None where it is not known."""
        if self.low is None or self.high is None:
            return None
        return self.low <= 1.0 <= self.high

    def as_json(self) -> dict[str, Any]:
        return {
            "value": self.value, "low": self.low, "high": self.high, "basis": self.basis,
            "units": self.num_units, "paired": self.is_paired, "noise": self.is_noise,
            "p_value": self.p_value,
        }  # fmt: skip


def ratio(
    base: Sequence[Sample], other: Sequence[Sample], *, value: float | None = None
) -> Ratio | None:
    """`other` over `base`, each the sum of its amounts over the sum of what they are per.

    `value` is put in the place of the ratio where it is known more directly (tokens over wall time
    instead of over the requests' own times): the interval keeps its width around it. None where a
    sum is zero.
    """
    base, other, is_paired = _paired(base, other)
    sums = [math.fsum(getattr(s, n) for s in arm) for arm in (base, other) for n in _FIELDS]
    if not all(total > 0 and math.isfinite(total) for total in sums):
        return None
    own = (sums[2] / sums[3]) / (sums[0] / sums[1])
    value = value or own
    found, by_repeat = _of_requests(base, other, is_paired), _of_repeats(base, other)
    if found is None:
        return Ratio(value, is_paired=is_paired)
    if by_repeat is not None and by_repeat.error > _NOTABLY * found.error:
        found = by_repeat
    low = value * math.exp(max(found.low, -_WIDEST))
    high = value * math.exp(min(found.high, _WIDEST))
    chance = found.chance_of(math.log(value))
    return Ratio(value, low, high, found.basis, found.num_units, is_paired, chance)


_FIELDS = ("amount", "per")


@dataclass(frozen=True)
class _Spread:
    """An interval of the log ratio around its estimate, and the standard error behind it."""

    low: float
    high: float
    error: float
    basis: str
    num_units: int

    def chance_of(self, log_ratio: float) -> float:
        """Student's tail, stretched so that it is 5 % where the interval ends."""
        if log_ratio == 0.0:
            return 1.0
        reach = -self.low if log_ratio > 0 else self.high
        if reach == 0.0:
            return 0.0
        degrees = self.num_units - 1
        return student_tail(abs(log_ratio) / reach * student(degrees), degrees)


def _paired(
    base: Sequence[Sample], other: Sequence[Sample]
) -> tuple[list[Sample], list[Sample], bool]:
    """The requests that both arms answered, in one order; all of them where none is shared."""
    first = {(sample.repeat, sample.key): sample for sample in base}
    second = {(sample.repeat, sample.key): sample for sample in other}
    shared = [place for place in first if place in second]
    if not shared:
        return list(base), list(other), False
    return [first[place] for place in shared], [second[place] for place in shared], True


def _of_requests(base: list[Sample], other: list[Sample], is_paired: bool) -> _Spread | None:
    """A unit is a request with all its repeats: what is special about it comes each time."""
    import numpy as np

    arms = [_by_key(base), _by_key(other)]
    if min(len(arm) for arm in arms) < 2:
        return None
    groups = [np.hstack(arms)] if is_paired else arms
    below = np.array([-1.0, 1.0])  # the base's own ratio stands under the other's
    signs = [np.hstack([below, -below])] if is_paired else [below, -below]
    ones = [np.ones((1, len(group))) for group in groups]
    (estimate,), _ = _log_ratio(groups, signs, ones)
    error = _left_out_error(groups, signs)
    num_units = min(len(group) for group in groups)
    if error == 0.0:
        return _Spread(0.0, 0.0, 0.0, "requests", num_units)
    reach = student(num_units - 1)
    if num_units < _FEWEST_DRAWN:
        return _Spread(-reach * error, reach * error, error, "requests", num_units)
    random = np.random.default_rng(_SEED)
    draws = [
        random.multinomial(len(g), np.full(len(g), 1 / len(g)), size=NUM_DRAWS).astype(float)
        for g in groups
    ]
    drawn, errors = _log_ratio(groups, signs, draws)
    pulls = (drawn - estimate) / np.maximum(errors, 1e-12)
    low, high = np.quantile(pulls, [0.025, 0.975])
    # Few units, drawn again, are too much alike: never narrower than Student's interval.
    low, high = min(float(low), -reach), max(float(high), reach)
    return _Spread(-high * error, -low * error, error, "requests", num_units)


def _left_out_error(groups: Sequence[Floats], signs: Sequence[Floats]) -> float:
    """The jackknife's standard error: a few large requests do not hide their weight from it."""
    import numpy as np

    variance = 0.0
    for group, sign in zip(groups, signs, strict=True):
        without = np.log(np.maximum(group.sum(0) - group, 1e-300)) @ sign
        variance += (len(group) - 1) * float(without.var())
    return math.sqrt(variance)


def _by_key(samples: Iterable[Sample]) -> Floats:
    """[units, 2]: amount and per of each request, its repeats added up."""
    import numpy as np

    sums: dict[str, list[float]] = {}
    for sample in samples:
        unit = sums.setdefault(sample.key, [0.0, 0.0])
        unit[0] += sample.amount
        unit[1] += sample.per
    return np.array(list(sums.values()), dtype=np.float64)


def _log_ratio(
    groups: Sequence[Floats], signs: Sequence[Floats], weights: Sequence[Floats]
) -> tuple[Floats, Floats]:
    """Log ratio and its standard error (delta method) for each row of weights.

    A group [units, F] is drawn as one; weights [draws, units] say how often each unit is in; signs
    say which sums stand above (+1) and which below (-1).
    """
    import numpy as np

    value, variance = np.zeros(len(weights[0])), np.zeros(len(weights[0]))
    for group, sign, weight in zip(groups, signs, weights, strict=True):
        sums = np.maximum(weight @ group, 1e-300)
        value += np.log(sums) @ sign
        # A unit's influence on the log ratio is sum_f sign_f x_f / sum_f: its square, added up.
        products = weight @ (group[:, :, None] * group[:, None, :]).reshape(len(group), -1)
        pull = sign / sums
        outer = (pull[:, :, None] * pull[:, None, :]).reshape(len(weight), -1)
        num_units = len(group)
        variance += (products * outer).sum(-1) * num_units / max(1, num_units - 1)
    return value, np.sqrt(np.maximum(variance, 0.0))


def _of_repeats(base: list[Sample], other: list[Sample]) -> _Spread | None:
    """Student's interval of the repeats' log ratios; None with too few repeats."""
    logs = []
    for repeat in sorted({s.repeat for s in base} & {s.repeat for s in other}):
        sums = [
            math.fsum(getattr(s, name) for s in arm if s.repeat == repeat)
            for arm in (base, other)
            for name in _FIELDS
        ]
        if min(sums) <= 0:
            return None
        logs.append(math.log(sums[2] / sums[3]) - math.log(sums[0] / sums[1]))
    if len(logs) < FEWEST_REPEATS:
        return None
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1)
    error = math.sqrt(variance / len(logs))
    reach = student(len(logs) - 1) * error
    return _Spread(-reach, reach, error, "repeats", len(logs))


def student(degrees: int) -> float:
    """The 97.5 % point of Student's distribution."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    return NORMAL + math.fsum(factor / degrees**n for n, factor in enumerate(_SERIES, 1))


def student_tail(distance: float, degrees: int) -> float:
    """The share of Student's distribution that is farther from 0 than `distance`, on both sides.

    A finite series in the angle's cosine (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    angle = math.atan2(distance, math.sqrt(degrees))
    square, is_odd = math.cos(angle) ** 2, degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    terms = []
    for power in range(2 + is_odd, degrees + 1, 2):
        terms.append(term)
        term *= square * (power - 1) / power
    inside = math.sin(angle) * math.fsum(terms)
    if is_odd:
        inside = (angle + inside) * 2 / math.pi
    return max(0.0, 1.0 - inside)
