"""Which rows of a pass somebody asks about: the others may end where the last layer attended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.engine.scheduler import Work


@dataclass(frozen=True)
class Asked:
    """Rows by what is asked of them."""

    logits: list[int]
    states: list[int]  # those of the logits are among them,
    places: list[int]  # here
    parts: list[slice]  # of the states, by work: what its head reads, if it has one

    @classmethod
    def about(cls, works: Sequence[Work], *, has_head: bool) -> Asked:
        """A head asks for all states of its request, the next token for logits."""
        asked, end = cls([], [], [], []), 0
        for work in works:
            begin, end = end, end + work.count
            first = end - work.num_logits
            before = len(asked.states)
            asked.logits.extend(range(first, end))
            is_fed = has_head and not work.request.is_headless
            asked.states.extend(range(begin if is_fed else first, end))
            asked.places.extend(range(len(asked.states) - work.num_logits, len(asked.states)))
            asked.parts.append(slice(before, len(asked.states) if is_fed else before))
        return asked
