"""Speculation counters of a server's /metrics: what they were before, and what they are after.

The prefix of the names tells the engine. Headstart's is tried first: it exports vLLM's names too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headstart.bench.records import Speculation

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_COPIED = re.compile(r'source="context"')
_DRAFTED, _ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"


@dataclass(frozen=True)
class Names:
    """What one engine calls its counters; None for what it does not count."""

    engine: str
    prefix: str
    rounds: str | None = "spec_decode_num_drafts_total"
    has_plain_rounds: bool = False
    draft_tokens: str | None = f"{_DRAFTED}_total"
    accepted_tokens: str | None = f"{_ACCEPTED}_total"
    accepted_by_source: str | None = None
    drafted_per_depth: str | None = None
    accepted_per_depth: str | None = f"{_ACCEPTED}_per_pos_total"
    output_tokens: str | None = None

    @property
    def all(self) -> list[str]:
        found = (self.rounds, self.draft_tokens, self.accepted_tokens)
        return [self.prefix + name for name in found if name is not None]

    @property
    def watched(self) -> list[str]:
        """Counters that fall only when the server is started again."""
        return self.all + ([] if self.output_tokens is None else [self.prefix + self.output_tokens])


ENGINES = (
    Names("headstart", "headstart:", rounds="decode_rounds_total", has_plain_rounds=True,
          accepted_by_source=f"{_ACCEPTED}_by_source_total",
          drafted_per_depth=f"{_DRAFTED}_per_pos_total"),
    Names("vllm", "vllm:"),
    # SGLang counts rounds only: acceptance follows from the tokens that were made in them.
    Names("sglang", "sglang:", rounds="spec_verify_calls_total", draft_tokens=None,
          accepted_tokens=None, accepted_per_depth=None, output_tokens="generation_tokens_total"),
    Names("llamacpp", "llamacpp:"),
    Names("lmdeploy", "lmdeploy:"),
    Names("trtllm", "trtllm_", rounds=None, accepted_per_depth=None),
)  # fmt: skip


@dataclass(frozen=True)
class Counters:
    """Sums over all labels, by position where a counter has that label, and of copies alone."""

    sums: Mapping[str, float]
    by_position: Mapping[str, Mapping[int, float]]
    copied: Mapping[str, float] = field(default_factory=dict)


def read_counters(exposition: str) -> Counters:
    """Of the Prometheus text format; lines that are no samples are passed over."""
    sums: dict[str, float] = {}
    by_position: dict[str, dict[int, float]] = {}
    copied: dict[str, float] = {}
    for line in exposition.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, text = found.groups()
        value = _value(text)
        if value is None:
            continue
        sums[name] = sums.get(name, 0.0) + value
        position = _POSITION.search(labels or "")
        if position is not None:
            depths = by_position.setdefault(name, {})
            depths[int(position[1])] = depths.get(int(position[1]), 0.0) + value
        if _COPIED.search(labels or ""):
            copied[name] = copied.get(name, 0.0) + value
    return Counters(sums, by_position, copied)


EMPTY = Counters({}, {})  # of a server that has counted nothing yet


def engine_of(counters: Counters) -> str | None:
    """The engine whose names are there, whether or not it drafts; None for any other."""
    found = (n.engine for n in ENGINES if any(name.startswith(n.prefix) for name in counters.sums))
    return next(found, None)


def speculation_between(before: Counters, after: Counters) -> Speculation | None:
    """What was counted in between; None where the server has no such counters, or counted no
    round and no draft."""
    for names in ENGINES:
        if not all(name in after.sums for name in names.all):
            continue
        found = _difference(names, before, after)
        if found is not None and (found.rounds or found.draft_tokens):
            return found
    return None


def counts_drafts(counters: Counters) -> bool:
    """Whether all that an engine counts about drafts is there, be it 0."""
    return any(all(name in counters.sums for name in names.all) for names in ENGINES)


def went_back(before: Counters, after: Counters) -> bool:
    """Whether a counter is smaller than it was: the server was started again in between."""
    watched = [name for names in ENGINES for name in names.watched if name in before.sums]
    return any(after.sums.get(name, 0.0) < before.sums[name] for name in watched)


def _difference(names: Names, before: Counters, after: Counters) -> Speculation | None:
    def total(name: str | None, *, copied: bool = False) -> int | None:
        now = after.copied if copied else after.sums
        then = before.copied if copied else before.sums
        full = names.prefix + (name or "")
        if name is None or full not in now:
            return None
        return round(now[full] - then.get(full, 0.0))

    def depths(name: str | None) -> tuple[int, ...]:
        full = names.prefix + (name or "")
        now, then = after.by_position.get(full, {}), before.by_position.get(full, {})
        counts = [
            round(now.get(i, 0.0) - then.get(i, 0.0)) for i in range(max(now, default=-1) + 1)
        ]
        return tuple(counts)

    drafted, accepted = depths(names.drafted_per_depth), depths(names.accepted_per_depth)
    if names.drafted_per_depth is not None:  # requests say how deep: not all drafted so deep now
        deepest = max((depth for depth, count in enumerate(drafted, 1) if count), default=0)
        drafted, accepted = drafted[:deepest], accepted[:deepest]
        accepted += (0,) * (deepest - len(accepted))
    return Speculation(
        source=names.engine,
        rounds=total(names.rounds),
        has_plain_rounds=names.has_plain_rounds,
        draft_tokens=total(names.draft_tokens),
        accepted_tokens=total(names.accepted_tokens),
        copied_tokens=total(names.accepted_by_source, copied=True),
        drafted_per_depth=drafted,
        accepted_per_depth=accepted,
        output_tokens=total(names.output_tokens),
    )


def _value(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
