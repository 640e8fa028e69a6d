"""What a check changes about the steps after it: rate, the base's share, and that of each kind.

Waiting until a head has lost too much of what was known, and then refusing it, would waste the
steps that led there; and what is like neither the base nor the requests loses more than the base
shows. So the base gets more of each step, at a lower rate, as soon as a quarter of what may be lost
is lost, and less again when it is not needed. Kinds of requests whose drafts have gained less than
those of others get a larger weight, up to twice that which they were asked with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headstart.learn.checking import WORST_ON_BASE

if TYPE_CHECKING:
    from headstart.learn.checking import Verdict

# Of the acceptance length on the base, lost by the head that was checked:
_TOO_MUCH, _MUCH, _LITTLE = WORST_ON_BASE / 2, WORST_ON_BASE / 4, WORST_ON_BASE / 8
MOST_BASE = 0.6  # of the tokens of a step
_MORE, _MUCH_MORE = 0.05, 0.1  # of the tokens of a step, at a check
_SLOWER, _MUCH_SLOWER = 0.7, 0.5  # times the rate; a lower one loses less for the same gain
_LOWEST = 0.25  # of the rate
_EVEN = 0.05  # gains are alike where this is much beside them
_LEAST, _MOST = 0.5, 2.0  # weights of kinds


class Steering:
    """Keeps how far each kind has come since the first head."""

    def __init__(self, base_share: float):
        self._least_base = base_share
        self.base_share = base_share
        self.rate_share = 1.0  # of the rate that learning begins with
        self._lengths: dict[str, float] = {}  # of kinds, over those of the first head
        self._checked: dict[str, float] = {}  # the same with the head that was checked last
        self.weights: dict[str, float] = {}

    @property
    def can_protect(self) -> bool:
        """Whether there is still something to give to what was known."""
        has_share = self._least_base > 0 and self.base_share < MOST_BASE
        return has_share or self.rate_share > _LOWEST

    def begin_anew(self) -> None:
        """From a head that has lost nothing, or with new texts."""
        self.base_share, self.rate_share = self._least_base, 1.0

    def checked(self, verdict: Verdict) -> None:
        loss = -verdict.learned_base if verdict.base.is_telling else 0.0
        if loss > _TOO_MUCH:
            self._protect(_MUCH_MORE, _MUCH_SLOWER)
        elif loss > _MUCH:
            self._protect(_MORE, _SLOWER)
        elif loss < _LITTLE:
            self._protect(-_MORE, 1 / _SLOWER)
        self._checked = self._lengths | {
            kind: self._lengths.get(kind, 1.0) * ratio for kind, ratio in verdict.ratios.items()
        }
        self.weights = weights(self._checked)

    def _protect(self, more: float, slower: float) -> None:
        self.rate_share = min(1.0, max(_LOWEST, self.rate_share * slower))
        if self._least_base:  # without a base there is nothing to give a share to
            self.base_share = min(MOST_BASE, max(self._least_base, self.base_share + more))

    def served(self, *, is_learned: bool) -> None:
        """The head that was checked last serves, or any other."""
        self._lengths = self._checked if is_learned else {}
        if not is_learned:
            self.begin_anew()


def weights(lengths: Mapping[str, float]) -> dict[str, float]:
    """How often texts of each kind come, by how many times longer its acceptance has become."""
    if not lengths:
        return {}
    gains = {kind: max(0.0, length - 1) for kind, length in lengths.items()}
    mean = sum(gains.values()) / len(gains)
    return {
        kind: min(_MOST, max(_LEAST, (mean + _EVEN) / (gain + _EVEN)))
        for kind, gain in gains.items()
    }
