"""A training for tests of the learning loop: nothing is computed, its head gains as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headstart.learn.certainty import Walked
from headstart.learn.training import NotFinite


class Scripted:
    """Its head accepts `gain` more drafts in a round with every step."""

    def __init__(self, gain: float = 0.0, fails_at: int | None = None):
        self.options = SimpleNamespace(learning_rate=1.0, num_depths=3)
        self.num_steps, self.rates = 0, list[float]()
        self.calls = list[str]()
        self.prepared = list[str]()
        self.max_len = 2048
        self.room = 10**6  # texts whose states can be prepared
        self._gain, self._fails_at, self._level = gain, fails_at, 0.0

    def can_learn(self, record: Any) -> bool:
        return record.num_prompt < self.max_len

    def forget(self, is_gone: Any) -> None:
        pass

    def learn_tokens(self, seen: set[int]) -> None:
        self.seen = seen

    def prepare(self, records: Sequence[Any]) -> bool:
        self.prepared += [record.id for record in records]
        return len(self.prepared) <= self.room

    def step(self, records: Sequence[Any], rate: float) -> float:
        self.num_steps += 1
        self.rates.append(rate)
        if self.num_steps == self._fails_at:
            raise NotFinite("the loss is nan")
        self._level += self._gain
        return 1.0

    def walk(self, records: Sequence[Any], share: float) -> dict[str, Walked]:
        more = self._level * share
        return {r.id: Walked(r.category, 100, int(150 + 100 * more), 100, 50) for r in records}

    def write(self, out: Path, details: dict[str, Any], share: float) -> None:
        self.calls.append(f"write {out.name} at {share}")

    def adopt(self, share: float) -> None:
        self.calls.append(f"adopt at {share}")

    def serve(self, head: Path) -> None:
        self.calls.append(f"serve {head.name}")
        self._level = 0.0

    def reset(self) -> None:
        self.calls.append("reset")
        self._level = 0.0
