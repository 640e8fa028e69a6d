"""When questions are asked: as fast as streams get free, or at times of their own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, get_args

from headstart.errors import ConfigError

Spacing = Literal["poisson", "constant"]
SPACINGS: tuple[Spacing, ...] = get_args(Spacing)  # the first is the default


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A closed loop has `concurrency` streams, each with one question open. An open loop has a
    rate; there `concurrency` is the most that may be open, and what waits for it is counted."""

    concurrency: int | None = field(default=None, metadata={"help": "streams; default: 1"})
    rate: float | None = field(
        default=None, metadata={"help": "conversations begun per second (open loop)"}
    )
    spacing: Spacing | None = field(
        default=None, metadata={"help": f"how a rate is spread; default: {SPACINGS[0]}"}
    )
    warm_up: int | None = field(
        default=None, metadata={"help": "requests before measuring; default: one per stream"}
    )
    time_limit_seconds: float | None = field(
        default=None, metadata={"help": "begin nothing after this; what is open is waited for"}
    )

    def __post_init__(self) -> None:
        for name, low in (("concurrency", 1), ("warm_up", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}; give at least {low}.")
        for name in ("rate", "time_limit_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; give more than 0.")

    @property
    def is_open(self) -> bool:
        return self.rate is not None

    @property
    def num_streams(self) -> int | None:
        """None: as many as there are."""
        return self.concurrency if self.is_open else self.concurrency or 1


def arrival_seconds(options: LoadOptions, number: int, seed: int) -> list[float]:
    """Since the start, in order; the first question comes at once."""
    assert options.rate is not None
    draw = random.Random(f"{seed} arrivals")
    times, now = [], 0.0
    for _ in range(number):
        times.append(now)
        spacing = options.spacing or SPACINGS[0]
        now += draw.expovariate(options.rate) if spacing == "poisson" else 1 / options.rate
    return times
