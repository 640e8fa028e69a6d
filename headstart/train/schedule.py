"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}


def learning_rate(step: int, num_steps: int, *, peak: float, warmup: float, schedule: str) -> float:
    """For the optimiser's step number `step` (from 0): up linearly, then down by the schedule."""
    num_warmup = math.ceil(warmup * num_steps)
    if step < num_warmup:
        return peak * (step + 1) / (num_warmup + 1)
    return peak * _SHAPES[schedule]((step - num_warmup) / max(1, num_steps - num_warmup))
