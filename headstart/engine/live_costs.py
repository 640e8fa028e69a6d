"""Costs of the two parts of a round, verification and draft steps, and which drafts pay by them.

Every part of a round is compared with its prediction, by batch size and K.
"""

from __future__ import annotations

from typing import Protocol

from headstart.engine.corrections import Corrections
from headstart.engine.draft_choice import Choice, Promises

Key = tuple[str, int, int]


class Costs(Protocol):
    """Seconds of the two parts of a round."""

    def verify_seconds(self, batch: int, rows: int) -> float: ...

    def draft_seconds(self, batch: int) -> float: ...

    def start_seconds(self, batch: int) -> float: ...


class LiveCosts:
    """Costs as profiled, times what live rounds say about them."""

    hysteresis = 0.05

    def __init__(self, profile: Costs):
        self._profile = profile
        self._corrections = Corrections()

    def verify_seconds(self, batch: int, rows: int) -> float:
        factor = self._corrections.factor(_verify_key(batch, rows))
        return self._profile.verify_seconds(batch, rows) * factor

    def draft_seconds(self, batch: int) -> float:
        return self._profile.draft_seconds(batch) * self._corrections.factor(_draft_key(batch))

    def start_seconds(self, batch: int) -> float:
        return self._profile.start_seconds(batch) * self._corrections.factor(_draft_key(batch))

    def round_seconds(self, batch: int, num_drafts: int) -> float:
        """A round in which everybody drafts so many."""
        verify = self.verify_seconds(batch, batch * (num_drafts + 1))
        return verify + self._drafting([batch] * num_drafts)

    def _drafting(self, active: list[int]) -> float:
        """Seconds of all draft steps; `active` are the numbers of requests at each depth."""
        return sum(self._step(active, depth) for depth in range(len(active)))

    def _step(self, active: list[int], depth: int) -> float:
        """The first step is a little longer than others."""
        start = 0.0 if depth else self.start_seconds(active[0])
        return start + self.draft_seconds(active[depth])

    def observe_verify(self, batch: int, rows: int, seconds: float) -> None:
        predicted = self._profile.verify_seconds(batch, rows)
        self._corrections.observe(_verify_key(batch, rows), seconds / predicted)

    def observe_drafts(self, batches: list[int], seconds: float) -> None:
        """`batches` are the numbers of requests at each depth."""
        start = self._profile.start_seconds(batches[0])
        predicted = start + sum(self._profile.draft_seconds(batch) for batch in batches)
        self._corrections.observe(_draft_key(batches[0]), seconds / predicted)

    def fade(self) -> None:
        self._corrections.fade()

    def best(self, promises: Promises, fixed: Promises, context: int) -> Choice:
        """Add drafts in the order of what they promise; stop where tokens per second are most."""
        ranked = _ranked(promises)
        batch = len(promises) + len(fixed)
        rows = batch + sum(map(len, fixed))
        tokens = float(len(promises))
        depths = max(map(len, [*promises, *fixed]), default=0)
        active = [sum(len(chain) > depth for chain in fixed) for depth in range(depths)]
        drafting = self._drafting(active)
        speeds = [tokens / (self.verify_seconds(batch, rows) + drafting)]
        for count, (gain, depth, _) in enumerate(ranked, 1):
            tokens += gain
            drafting -= self._step(active, depth)
            active[depth] += 1
            drafting += self._step(active, depth)
            speeds.append(tokens / (self.verify_seconds(batch, rows + count) + drafting))
        best_count = speeds.index(max(speeds))
        drafts = [0] * len(promises)
        for _, _, at in ranked[:best_count]:
            drafts[at] += 1
        return Choice(
            drafts, speeds[best_count], speeds[0], speeds[-1],
            self.round_seconds(batch, 1) / self.round_seconds(batch, 0) - 1,
        )  # fmt: skip


def _ranked(promises: Promises) -> list[tuple[float, int, int]]:
    """(expected tokens, depth from 0, whose) of every draft that could be made, best first."""
    drafts = [
        (gain, depth, at) for at, chain in enumerate(promises) for depth, gain in enumerate(chain)
    ]
    return sorted(drafts, key=lambda draft: (-draft[0], draft[1]))


def _draft_key(batch: int) -> Key:
    return "draft", batch.bit_length(), 0


def _verify_key(batch: int, rows: int) -> Key:
    return "verify", batch.bit_length(), round(rows / batch) - 1
