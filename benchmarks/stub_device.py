"""What rounds would take a device that there is not, and when the host would wait for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headstart.backends.base import Emitted
from headstart.backends.cuda.launched import LaunchedRound
from headstart.engine.auto.costs import RoundCosts
from headstart.engine.options import MENU

# Rough sizes, an H200 and 7.8B in bf16, in milliseconds: a draft step of 64 requests, the choice, a
# token of context, 16 tokens that the head of each reads late, what launching takes the host, and
# what a copied row takes more than one of a prompt.
DRAFT, CHOICE, CONTEXT, LATE, LAUNCH, COPIED_ROW = 0.35, 0.5, 3.7e-5, 0.8, 0.4, 0.006


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of rounds on a device."""

    passes: dict[int, float]  # milliseconds by rows, of sizes that there are

    def a_round(
        self, requests: int, drafts: int, context: int, *, more: int = 0, late: int = 0
    ) -> float:
        """With `more` copied rows, and `late` tokens that the head of each request reads."""
        rows = requests * (drafts + 1) + more
        size = next(size for size in self.passes if size >= rows)
        besides = COPIED_ROW * more + LATE * late / 16 + DRAFT * drafts + CHOICE + CONTEXT * context
        return (self.passes[size] + besides) / 1e3

    def table(self, requests: int, most_rows: int) -> RoundCosts:
        """As `auto` times them."""
        seconds = tuple((k, self.a_round(requests, k, 0)) for k in MENU)
        return RoundCosts(
            ((requests, seconds),), catch_up=((requests, LATE / 1e3),), window=15,
            context=((requests, tuple((k, CONTEXT / 1e3) for k in MENU)),),
            passes=tuple((rows, ms / 1e3) for rows, ms in self.passes.items() if rows <= most_rows),
        )  # fmt: skip


@dataclass
class Clock:
    """The time of the engine's thread, and of the device that it would wait for."""

    stub: float = 0.0  # seconds of the thread in which a device would have worked instead
    waited: float = 0.0  # by the host
    free: float = 0.0  # when the device is
    idle: float = 0.0  # of the device, between rounds

    def now(self) -> float:
        return time.thread_time() - self.stub + self.waited

    def run(self, began: float, seconds: float) -> float:
        """When a round ends that is launched at a time."""
        self.idle += max(0.0, began - self.free) if self.free else 0.0
        self.free = max(began, self.free) + seconds
        return self.free


@dataclass
class StubRound(LaunchedRound):
    """A round whose outcome is there when a device would have been done with it."""

    clock: Clock = field(default_factory=Clock)
    ends: float = 0.0

    def collect(self) -> list[Emitted]:
        self.clock.waited += max(0.0, self.ends - self.clock.now())
        return super().collect()
