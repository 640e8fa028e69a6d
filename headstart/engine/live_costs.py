"""A profile of costs, kept honest by what rounds really take.

Every part of a round is compared with its prediction, by batch size and K. What has not been
seen is taken to be as wrong as the rest: a busy machine, or long contexts, make everything
slower, and that changes no decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_COMMON_SHARE = 0.05  # of a new observation, in what all have in common
_OWN_SHARE = 0.1  # in what one batch size and K has of its own; the first ones count for more
_MOST = 2.0  # times what was expected: a pause of the machine is not a cost
_WELL_KNOWN = 10  # observations after which a change is taken to be everybody's,
_TOGETHER = 0.8  # to this power: a small part is still its own
_FADING = 0.7  # of a correction that has not been seen again for a while

Key = tuple[str, int, int]


class Costs(Protocol):
    """Seconds of the two parts of a round."""

    def verify_seconds(self, batch: int, rows: int) -> float: ...

    def draft_seconds(self, batch: int) -> float: ...


@dataclass
class _Factor:
    """Seconds over predicted seconds, and from how many observations."""

    value: float
    count: int = 0


class LiveCosts:
    """Costs as profiled, times what live rounds say about them."""

    def __init__(self, profile: Costs):
        self._profile = profile
        self._common = 1.0
        self._own: dict[Key, _Factor] = {}
        self._fresh: set[Key] = set()  # seen since the last fading

    def verify_seconds(self, batch: int, rows: int) -> float:
        return self._profile.verify_seconds(batch, rows) * self._factor(_verify_key(batch, rows))

    def draft_seconds(self, batch: int) -> float:
        return self._profile.draft_seconds(batch) * self._factor(_draft_key(batch))

    def observe_verify(self, batch: int, rows: int, seconds: float) -> None:
        predicted = self._profile.verify_seconds(batch, rows)
        self._observe(_verify_key(batch, rows), seconds / predicted)

    def observe_drafts(self, batches: list[int], seconds: float) -> None:
        """`batches` are the numbers of requests at each depth."""
        predicted = sum(self._profile.draft_seconds(batch) for batch in batches)
        self._observe(_draft_key(batches[0]), seconds / predicted)

    def fade(self) -> None:
        """What was not seen again loses its own factor: a bad spell must not rule a K out."""
        for key in self._own.keys() - self._fresh:
            own = self._own[key].value
            self._own[key] = _Factor(self._common + (own - self._common) * _FADING)
        self._fresh.clear()

    def _factor(self, key: Key) -> float:
        own = self._own.get(key)
        return self._common if own is None else own.value

    def _observe(self, key: Key, ratio: float) -> None:
        own = self._own.setdefault(key, _Factor(self._common))
        ratio, before = min(ratio, _MOST * own.value), own.value
        own.value += max(_OWN_SHARE, 1 / (3 + own.count)) * (ratio - own.value)
        own.count += 1
        self._common += _COMMON_SHARE * (ratio - self._common)
        self._fresh.add(key)
        if own.count > _WELL_KNOWN:
            # What is well known does not change by itself: the machine does, for all of them.
            change = (own.value / before) ** _TOGETHER
            for other in self._own.values():
                other.value *= change if other is not own else 1.0


def _draft_key(batch: int) -> Key:
    return "draft", batch.bit_length(), 0


def _verify_key(batch: int, rows: int) -> Key:
    return "verify", batch.bit_length(), round(rows / batch) - 1
