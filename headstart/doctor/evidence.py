"""What a server's counters say about drafts at depth 1, exactly or within bounds.

An engine that counts accepted drafts by depth tells the rate. Others tell how many drafts a round
has accepted, or how many drafts of all were: acceptance never rises with depth, which bounds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headstart.bench.records import Speculation

Interval = tuple[float, float]
_NORMAL = 1.96  # standard errors on each side of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Drafts of so many rounds; `low` and `high` are the same where depth 1 was counted."""

    source: str  # what counted them, in words
    rounds: int
    low: float  # share of rounds whose first draft was accepted: at least
    high: float  # and at most
    per_round: float | None = None  # accepted drafts of a round, all depths together
    by_depth: tuple[float, ...] = ()  # cumulative, where counted

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    @property
    def interval(self) -> Interval:
        """95 % for acceptance at depth 1, as if rounds were independent of each other."""
        return wilson(self.low, self.rounds)[0], wilson(self.high, self.rounds)[1]

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "rounds": self.rounds,
            "depth_1": {"low": self.low, "high": self.high, "interval": list(self.interval)},
            "accepted_per_round": self.per_round,
            "cumulative_acceptance": list(self.by_depth),
        }


def evidence_of(
    found: Speculation, source: str, *, num_drafts: int | None = None, num_requests: int = 0
) -> Evidence | None:
    """None where nothing was drafted, or nothing follows for depth 1.

    `num_drafts` is K where it is known; `num_requests` were answered in rounds whose tokens alone
    were counted: the first token of each is of no round.
    """
    if found.accepted_per_depth and (rounds := _rounds_at_depth_1(found)):
        rate = min(1.0, found.accepted_per_depth[0] / rounds)
        accepted = found.accepted_tokens
        return Evidence(
            source=source, rounds=rounds, low=rate, high=rate, by_depth=found.cumulative,
            per_round=None if accepted is None else accepted / rounds,
        )  # fmt: skip
    accepted = found.accepted_tokens
    if accepted is None and found.output_tokens is not None:
        accepted = max(0, found.output_tokens - num_requests - (found.rounds or 0))
    if accepted is None:
        return None
    if found.rounds and not found.has_plain_rounds:
        mean = accepted / found.rounds
        least = mean / num_drafts if num_drafts else 0.0
        return Evidence(
            source=source, rounds=found.rounds, low=min(1.0, least), high=min(1.0, mean),
            per_round=mean,
        )  # fmt: skip
    if not found.draft_tokens:
        return None
    rate = accepted / found.draft_tokens
    if num_drafts is None:  # rounds have at least one draft each
        return Evidence(source=source, rounds=found.draft_tokens, low=rate, high=1.0)
    return Evidence(
        source=source, rounds=math.ceil(found.draft_tokens / num_drafts), low=rate,
        high=min(1.0, rate * num_drafts), per_round=rate * num_drafts,
    )  # fmt: skip


def of_chunks(sizes: list[list[int]], source: str) -> Evidence | None:
    """From how many tokens the chunks of streams held, a chunk taken for a round.

    None where no chunk held more than one token: whether anything was drafted is not known then.
    """
    rounds = [size for chunks in sizes for size in chunks[1:]]  # the first token is of no round
    if not rounds or max(rounds) < 2:
        return None
    by_depth = [
        sum(size > depth for size in rounds) / len(rounds) for depth in range(1, max(rounds))
    ]
    return Evidence(
        source=source, rounds=len(rounds), low=by_depth[0], high=by_depth[0],
        by_depth=tuple(by_depth), per_round=sum(rounds) / len(rounds) - 1,
    )  # fmt: skip


def wilson(rate: float, tries: int) -> Interval:
    """Wilson's 95 % interval of a share."""
    if not tries:
        return 0.0, 1.0
    square = _NORMAL**2 / tries
    middle = (rate + square / 2) / (1 + square)
    spread = _NORMAL * math.sqrt(rate * (1 - rate) / tries + square / tries / 4) / (1 + square)
    return max(0.0, middle - spread), min(1.0, middle + spread)


def _rounds_at_depth_1(found: Speculation) -> int:
    """Rounds that had a first draft."""
    if found.drafted_per_depth:
        return found.drafted_per_depth[0]
    return 0 if found.has_plain_rounds else found.rounds or 0
