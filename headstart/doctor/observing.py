"""A running server of any kind, looked at from outside: its engine, its version, its drafts.

Counters of /metrics come first, then what comes with answers to requests of our own, then the sizes
of chunks in their streams. What a server does not show is said, not guessed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.bench.asking import Asking
from headstart.bench.metrics_scrape import (
    EMPTY,
    Counters,
    engine_of,
    read_counters,
    speculation_between,
)
from headstart.bench.records import Speculation
from headstart.bench.response_counters import total_speculation
from headstart.bench.target import Target
from headstart.doctor.evidence import Evidence, evidence_of, of_chunks
from headstart.doctor.requests import Answered, ask_all
from headstart.doctor.verdict import FEWEST_ROUNDS
from headstart.families.engines import ENGINE_TITLES

# TensorRT-LLM's /metrics is JSON about iterations.
_METRICS = ("/metrics", "/prometheus/metrics")
# Where servers tell their version, and under which name.
_VERSIONS = (
    ("/version", "version"),
    ("/server_info", "version"),
    ("/get_server_info", "version"),
    ("/props", "build_info"),
)
_TITLES = {**ENGINE_TITLES, "headstart": "Headstart", "lmdeploy": "LMDeploy"}
# How an engine is made to show its counters.
_SHOWS = {
    "sglang": "start it with --enable-metrics",
    "llamacpp": "start it with --metrics",
    "trtllm": "set return_perf_metrics: true",
}
_STEPS = "sglang:spec_num_steps"  # K
_WRITTEN = ("generation_tokens_total", "tokens_predicted_total")
_REQUESTS = "sglang:num_requests_total"


def title_of(engine: str | None) -> str:
    return "the server" if engine is None else _TITLES[engine]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What could be known; `missing` says what could not, where there is no evidence."""

    engine: str | None
    version: str | None
    num_drafts: int | None  # K
    evidence: Evidence | None
    is_off: bool = False  # whether the server says that it drafts nothing
    missing: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "version": self.version,
            "speculate": self.num_drafts,
            "evidence": None if self.evidence is None else self.evidence.as_json(),
        }


class RunningServer:
    """Answers are looked up once, counters every time."""

    def __init__(self, target: Target, *, engine: str | None = None, version: str | None = None):
        self.target, self.asking = target, Asking(target)
        self._engine, self._version = engine, version

    def counters(self) -> Counters | None:
        """None where the server shows none; ServerError where no server answers."""
        for path in _METRICS:
            status, found = self.asking.ask(path)
            if status == 200 and isinstance(found, str):
                return read_counters(found)
        return None

    def engine(self, counters: Counters | None) -> str | None:
        return self._engine or (None if counters is None else engine_of(counters))

    def is_up(self) -> bool:
        return self.asking.ask("/v1/models")[0] == 200

    def version(self) -> str | None:
        """As the server tells it; a build of llama.cpp as b10586."""
        if self._version is None:
            for path, name in _VERSIONS:
                status, found = self.asking.ask(path)
                said = found.get(name) if status == 200 and isinstance(found, Mapping) else None
                if isinstance(said, str) and said:
                    self._version = said.split("-")[0] if name == "build_info" else said
                    break
        return self._version


def observe(
    server: RunningServer, *, ask: int = 0, seconds: float = 0.0, num_drafts: int | None = None
) -> Observation:
    """Drafts since the server's start, or those of `seconds` from now, or of `ask` requests."""
    first = server.counters()
    before, answers = EMPTY, list[Answered]()
    if ask:
        before = first or EMPTY
        answers = ask_all(server.asking, ask, server.engine(first), server.target.timeout_seconds)
    elif seconds:
        before = first or EMPTY
        time.sleep(seconds)
    after = server.counters() if ask or seconds else first
    return observed(server, before, after, answers, num_drafts)


def observed(
    server: RunningServer,
    before: Counters,
    after: Counters | None,
    answers: list[Answered],
    num_drafts: int | None,
) -> Observation:
    """What counters and answers come to."""
    engine = server.engine(after)
    drafts = _num_drafts(after) or num_drafts
    evidence = None
    if after is not None and (found := speculation_between(before, after)) is not None:
        drafts = drafts or _alike(found)
        source = f"{title_of(found.source)}'s /metrics"
        requests = round(after.sums.get(_REQUESTS, 0) - before.sums.get(_REQUESTS, 0))
        evidence = evidence_of(found, source, num_drafts=drafts, num_requests=requests)
    if evidence is None and answers:
        told = total_speculation([answer.speculation for answer in answers])
        drafts = drafts or (None if told is None else _alike(told))
        evidence = None if told is None else evidence_of(told, "the answers", num_drafts=drafts)
        sizes = [answer.sizes for answer in answers]
        evidence = evidence or of_chunks(sizes, "chunks of streams, each taken for a round")
    is_off = evidence is None and _says_off(before, after)
    return Observation(
        engine=engine, version=server.version(), num_drafts=drafts, evidence=evidence,
        is_off=is_off, missing="" if evidence or is_off else _missing(engine, after, answers),
    )  # fmt: skip


def _num_drafts(counters: Counters | None) -> int | None:
    steps = 0.0 if counters is None else counters.sums.get(_STEPS, 0.0)
    return round(steps) or None


def _alike(found: Speculation) -> int | None:
    """K where every round had equally many drafts."""
    if found.has_plain_rounds or not found.rounds or not found.draft_tokens:
        return None
    return None if found.draft_tokens % found.rounds else found.draft_tokens // found.rounds


def _says_off(before: Counters, after: Counters | None) -> bool:
    """Whether enough tokens were written to tell, by counters that know of no draft."""
    if after is None:
        return False
    made = [name for name in after.sums if name.endswith(_WRITTEN)]
    return any(
        after.sums[name] - before.sums.get(name, 0.0) >= FEWEST_ROUNDS for name in made
    )  # fmt: skip


def _missing(engine: str | None, counters: Counters | None, answers: list[Answered]) -> str:
    if answers:
        return (
            f"{len(answers)} answers came without counters, and no chunk held more than one "
            "token: either nothing is drafted or no draft is accepted."
        )
    if counters is None:
        how = _SHOWS.get(engine or "", "have it show them")
        return (
            f"{title_of(engine)} shows no counters at /metrics; {how}, or let --ask 20 send "
            "requests and see what comes back."
        )
    return "no round with drafts was counted; ask again after some requests, or give --ask 20."
