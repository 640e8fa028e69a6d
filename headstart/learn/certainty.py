"""Whether one head drafts better than another on the same answers, with how much certainty.

Answers are paired: both heads walked the same ones. Acceptance length is tokens per round over all
answers, so the ratio of two heads is compared by drawing answers anew (paired bootstrap), by a
generator with a fixed seed: the same numbers always give the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.sampling.acceptance import Acceptance

_DRAWS = 2000
FEWEST = 8  # answers; of fewer nothing is certain
_MANY = 64  # from which on the measured value is nearer to the truth than a per cent, mostly


@dataclass(frozen=True)
class Walked:
    """One answer as one head walked it."""

    kind: str
    rounds: int
    tokens: int  # that these rounds gave
    tried: float = 0  # rounds that drafted at all,
    firsts: float = 0  # and those whose first draft was accepted


@dataclass(frozen=True)
class Gain:
    """New over old acceptance length, less 1: measured, and the lowest and highest to expect."""

    old: float
    new: float
    low: float  # 95 % of draws are above
    high: float  # 95 % of draws are below
    answers: int

    @property
    def value(self) -> float:
        return self.new / self.old - 1

    @property
    def is_better(self) -> bool:
        """With 95 % certainty."""
        return self.answers >= FEWEST and self.low > 0

    def is_worse_by(self, share: float) -> bool:
        """Whether the length is lower by more than `share`: as measured, with few answers only if
        that is certain."""
        if self.answers < _MANY:
            return self.answers >= FEWEST and self.high < -share
        return self.value < -share

    @property
    def is_telling(self) -> bool:
        """Whether there are enough answers for a per cent to mean something."""
        return self.answers >= _MANY


def counted(kind: str, counters: Iterable[Acceptance]) -> Walked:
    """What the engine or the simulator counted for one answer."""
    rounds = accepted = tried = firsts = 0
    for own in counters:
        rounds += own.rounds
        accepted += sum(own.accepted)
        tried += own.drafted[0] if own.drafted else 0
        firsts += own.accepted[0] if own.accepted else 0
    return Walked(kind, rounds, rounds + accepted, tried, firsts)


def length(walked: Sequence[Walked]) -> float:
    """Acceptance length over all answers."""
    rounds = sum(each.rounds for each in walked)
    return sum(each.tokens for each in walked) / rounds if rounds else 1.0


def compare(old: Sequence[Walked], new: Sequence[Walked]) -> Gain:
    """Acceptance lengths; both in the same order of answers."""
    assert len(old) == len(new), "answers are paired"
    if not old:
        return Gain(1.0, 1.0, 0.0, 0.0, 0)
    drawn = np.random.default_rng(0).integers(0, len(old), (_DRAWS, len(old)))
    lengths = [_drawn_ratio(part, "tokens", "rounds", drawn) for part in (old, new)]
    low, high = np.quantile(lengths[1] / lengths[0] - 1, [0.05, 0.95])
    return Gain(length(old), length(new), float(low), float(high), len(old))


def first_rate(walked: Sequence[Walked]) -> float:
    """How often the first draft is accepted: it does not depend on how many are drafted."""
    tried = sum(each.tried for each in walked)
    return sum(each.firsts for each in walked) / tried if tried else 0.0


def compare_live(old: Sequence[Walked], new: Sequence[Walked]) -> Gain:
    """Rates of first drafts of different answers, before and after a swap."""
    if not old or not new:
        return Gain(1.0, 1.0, 0.0, 0.0, 0)
    rng = np.random.default_rng(0)
    rates = [
        _drawn_ratio(part, "firsts", "tried", rng.integers(0, len(part), (_DRAWS, len(part))))
        for part in (old, new)
    ]
    low, high = np.quantile(rates[1] / np.maximum(rates[0], 1e-9) - 1, [0.05, 0.95])
    return Gain(max(first_rate(old), 1e-9), first_rate(new), float(low), float(high), len(new))


def _drawn_ratio(
    walked: Sequence[Walked], above: str, below: str, drawn: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Sums of one column over sums of another, of each set of drawn answers."""
    columns = [
        np.array([getattr(each, name) for each in walked], np.float64)[drawn].sum(1)
        for name in (above, below)
    ]
    result: NDArray[np.float64] = columns[0] / np.maximum(columns[1], 1)
    return result
