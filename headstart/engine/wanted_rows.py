"""Which rows of a pass somebody wants: the others may end where the last layer attended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.engine.scheduler import Work


@dataclass(frozen=True)
class WantedRows:
    """Rows by what is wanted of them."""

    logits: list[int]
    states: list[int]  # those of the logits are among them,
    places: list[int]  # here
    parts: list[slice]  # of the states, by work: what its head reads, if it has one

    @classmethod
    def about(cls, works: Sequence[Work], *, has_head: bool) -> WantedRows:
        """A head wants all states of its request, the next token logits."""
        wanted, end = cls([], [], [], []), 0
        for work in works:
            begin, end = end, end + work.count
            first = end - work.num_logits
            before = len(wanted.states)
            wanted.logits.extend(range(first, end))
            is_fed = has_head and not work.request.is_headless
            wanted.states.extend(range(begin if is_fed else first, end))
            wanted.places.extend(range(len(wanted.states) - work.num_logits, len(wanted.states)))
            wanted.parts.append(slice(before, len(wanted.states) if is_fed else before))
        return wanted
