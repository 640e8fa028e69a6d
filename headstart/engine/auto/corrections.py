"""What rounds take over what was profiled: a factor for each kind and size of pass.

A busy machine makes everything slower, and that changes no decision. So a factor has two parts:
what all passes have in common, which follows the machine within some rounds, and what one batch
size and K has of its own, which is learnt slowly and outlasts bad spells.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

_COMMON_GAIN = 0.2  # of what an observation differs by, that all passes have in common
_FARTHEST = math.log(2)  # that one observation may differ by: a pause of the machine is not a cost
# Variances of logarithms: how far a profile may be off, how much that changes in a round, and how
# much times vary, of which the last is learnt.
_DOUBT, _DRIFT, _NOISE = 0.01, 2e-5, 0.02
_NOISE_GAIN, _LEAST_NOISE = 0.05, 0.001
_WELL_SEEN = 10  # times, after which what an observation differs by is noise


@dataclass
class _Own:
    """The logarithm of a factor, its variance, how often it was seen, and when last."""

    value: float = 0.0
    variance: float = _DOUBT
    count: int = 0
    seen: int = 0


class HostCorrections:
    """Factors of passes that the host times, on a machine that others use as well.

    The more times vary, the less a single one says, and the more the profile counts.
    """

    def __init__(self) -> None:
        self._common, self._count, self._noise = 0.0, 0, _NOISE
        self._own: dict[Hashable, _Own] = {}
        self._factors: dict[Hashable, float] = {}  # a choice asks for few of them very often

    def factor(self, key: Hashable) -> float:
        if key not in self._factors:
            own = self._own.get(key)
            self._factors[key] = math.exp(self._common + (0.0 if own is None else own.value))
        return self._factors[key]

    def observe(self, key: Hashable, ratio: float) -> None:
        """Something took `ratio` times as long as predicted."""
        self._factors.clear()
        own = self._own.setdefault(key, _Own())
        self._count += 1
        rest = math.log(ratio) - self._common - own.value
        if self._count > 1:
            rest = max(-_FARTHEST, min(_FARTHEST, rest))
        if own.count >= _WELL_SEEN:  # before that it is the profile that is off
            self._noise += _NOISE_GAIN * (max(_LEAST_NOISE, rest * rest) - self._noise)
        common = max(_COMMON_GAIN, 1 / self._count) * rest
        self._common += common
        variance = min(_DOUBT, own.variance + _DRIFT * (self._count - own.seen))
        gain = variance / (variance + self._noise)
        own.value += gain * (rest - common)
        own.variance, own.seen = (1 - gain) * variance, self._count
        own.count += 1

    def fade(self) -> None:
        """Tries correct what was seen in a bad spell; nothing has to be forgotten for that."""


_COMMON_SHARE = 0.05  # of a new observation, in what all have in common
_OWN_SHARE = 0.1  # in what one batch size and K has of its own; the first ones count for more
_MOST = 2.0  # times what was expected
_WELL_KNOWN = 10  # observations after which a change is taken to be one of the whole device,
_TOGETHER = 0.8  # to this power: a small part is still its own
_FADING = 0.95  # what is left of a correction that has not been seen again for a while


@dataclass
class _Factor:
    """Seconds over predicted seconds, and from how many observations."""

    value: float
    count: int = 0


class DeviceCorrections:
    """Factors of captured rounds, timed by the device's own clock, which has little noise."""

    def __init__(self) -> None:
        self._common = 1.0
        self._own: dict[Hashable, _Factor] = {}
        self._fresh: set[Hashable] = set()  # seen since the last fading

    def factor(self, key: Hashable) -> float:
        own = self._own.get(key)
        return self._common if own is None else own.value

    def observe(self, key: Hashable, ratio: float) -> None:
        """Something took `ratio` times as long as predicted; a first one is taken as it is."""
        own = self._own.setdefault(key, _Factor(self._common))
        ratio, before = min(ratio, _MOST * own.value), own.value
        own.value += max(_OWN_SHARE, 1 / (1 + own.count)) * (ratio - own.value)
        own.count += 1
        self._common += _COMMON_SHARE * (ratio - self._common)
        self._fresh.add(key)
        if own.count > _WELL_KNOWN:
            # What is well known does not change by itself: the device does, for all keys.
            change = (own.value / before) ** _TOGETHER
            for other in self._own.values():
                other.value *= change if other is not own else 1.0

    def fade(self) -> None:
        """What was not seen again loses its own factor: a bad spell must not rule a K out."""
        for key in self._own.keys() - self._fresh:
            own = self._own[key].value
            self._own[key] = _Factor(self._common + (own - self._common) * _FADING)
        self._fresh.clear()
