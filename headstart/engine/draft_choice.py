"""What `Speculation` asks of costs: which drafts give the most tokens per second.

There are two kinds: rounds whose every row and draft step costs something (`LiveCosts`), and
captured rounds, which cost what their largest K does (`LiveRounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MENU = (0, 1, 2, 3, 5, 8)  # numbers of drafts whose rounds are timed, and captured on a GPU
Promises = Sequence[Sequence[float]]  # by request: expected tokens of its drafts, by depth


@dataclass(frozen=True)
class Choice:
    """Drafts of each request that was free to choose, and what they promise."""

    drafts: list[int]
    speed: float  # tokens per second,
    plain_speed: float  # without drafts,
    full_speed: float  # with all that could be made
    break_even: float  # how often one draft each must be right to pay


class DraftCosts(Protocol):
    """Costs of rounds, kept honest by what rounds really take."""

    hysteresis: float  # a draft that was not made must promise this much more, one that was less

    def best(self, promises: Promises, fixed: Promises, context: int) -> Choice:
        """`fixed` are those who draft what they do; `context` counts all tokens of all."""
        ...

    def round_seconds(self, batch: int, num_drafts: int) -> float: ...

    def fade(self) -> None:
        """Corrections that have not been seen again for a while count for less."""
        ...
