"""How wrong predicted seconds have been, by what was predicted.

What has not been seen is taken to be as wrong as the rest: a busy machine makes everything
slower, and that changes no decision.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

_COMMON_SHARE = 0.05  # of a new observation, in what all have in common
_OWN_SHARE = 0.1  # in what one batch size and K has of its own; the first ones count for more
_MOST = 2.0  # times what was expected: a pause of the machine is not a cost
_WELL_KNOWN = 10  # observations after which a change is taken to be one of the whole machine,
_TOGETHER = 0.8  # to this power: a small part is still its own


@dataclass
class _Factor:
    """Seconds over predicted seconds, and from how many observations."""

    value: float
    count: int = 0


class Corrections:
    """A factor for everything that is predicted."""

    def __init__(self, *, doubt: int, fading: float):
        """`doubt`: 1 takes a first observation as it is, more counts it for less.

        `fading` is what is left of a correction that has not been seen again for a while.
        """
        self._doubt, self._fading, self._common = doubt, fading, 1.0
        self._own: dict[Hashable, _Factor] = {}
        self._fresh: set[Hashable] = set()  # seen since the last fading

    def factor(self, key: Hashable) -> float:
        own = self._own.get(key)
        return self._common if own is None else own.value

    def observe(self, key: Hashable, ratio: float) -> None:
        """Something took `ratio` times as long as predicted."""
        own = self._own.setdefault(key, _Factor(self._common))
        ratio, before = min(ratio, _MOST * own.value), own.value
        own.value += max(_OWN_SHARE, 1 / (self._doubt + own.count)) * (ratio - own.value)
        own.count += 1
        self._common += _COMMON_SHARE * (ratio - self._common)
        self._fresh.add(key)
        if own.count > _WELL_KNOWN:
            # What is well known does not change by itself: the machine does, for all keys.
            change = (own.value / before) ** _TOGETHER
            for other in self._own.values():
                other.value *= change if other is not own else 1.0

    def fade(self) -> None:
        """What was not seen again loses its own factor: a bad spell must not rule a K out."""
        for key in self._own.keys() - self._fresh:
            own = self._own[key].value
            self._own[key] = _Factor(self._common + (own - self._common) * self._fading)
        self._fresh.clear()
