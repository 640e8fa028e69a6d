"""Rows of a table: one kind at one load, by every server in turn; first tokens after a start."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from over_http.client import Answer, arrivals, ask, closed_loop, request_bytes
from over_http.load import Job, Workload, num_requests
from over_http.servers import Server
from over_http.summary import counted, summary

_WARM_TOKENS = 16
_GRACE = 90.0  # seconds that answers under way may take after a row's limit
_FIRST, _LATER = 8, 100


@dataclass(frozen=True)
class Row:
    """One kind of request at a number of streams, or of arrivals per second."""

    kind: str
    streams: int = 0
    rate: float = 0.0

    @property
    def load(self) -> str:
        return f"{self.rate:g}/s" if self.rate else str(self.streams)


@dataclass(frozen=True)
class Limits:
    """Of one row: seconds, warm-up requests, repeats, and requests (None: by streams)."""

    seconds: float
    warm: int
    repeats: int
    requests: int | None = None


def rows(kinds: Sequence[str], streams: Sequence[int], rates: Sequence[float]) -> list[Row]:
    """All rows, kind after kind; `greedy:1/8` has streams of its own."""
    found = []
    for given in kinds:
        kind, _, own = given.partition(":")
        numbers = [int(number) for number in own.split("/")] if own else streams
        loads = [(0, rate) for rate in rates] if kind == "arrivals" else [(n, 0) for n in numbers]
        found += [Row(kind, number, rate) for number, rate in loads]
    return found


def measured(
    row: Row, servers: Sequence[Server], workload: Workload, limits: Limits
) -> dict[str, dict[str, Any]]:
    """Each server's figures; they take turns, in another order each time."""
    runs: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for repeat in range(limits.repeats):
        jobs = _jobs(row, workload, repeat, limits)
        for server in servers if repeat % 2 == 0 else reversed(servers):
            _warm_up(server, row, workload, repeat, limits)
            runs[server.name].append(_run(row, server, jobs, limits))
    return {name: _together(found) for name, found in runs.items()}


def _jobs(row: Row, workload: Workload, repeat: int, limits: Limits) -> list[Job]:
    if row.rate:
        count = limits.requests or max(8, round(row.rate * limits.seconds))
        return workload.jobs(row.kind, row.rate, repeat, count)
    count = limits.requests or num_requests(row.streams)
    return workload.jobs(row.kind, row.streams, repeat, max(count, row.streams))


def _warm_up(server: Server, row: Row, workload: Workload, repeat: int, limits: Limits) -> None:
    """A few short answers of the kind: libraries and grammars that are used for the first time."""
    if not limits.warm:
        return
    jobs = workload.jobs(row.kind, -1, repeat, limits.warm)
    short = [Job(j.path, {**j.fields, "max_tokens": _WARM_TOKENS}) for j in jobs]
    if row.kind == "prefix":  # the prefix of the row itself: that it is cached is the point
        first = workload.jobs(row.kind, row.streams, repeat, 1)[0]
        short = [Job(first.path, {**first.fields, "max_tokens": _WARM_TOKENS})]
    asyncio.run(closed_loop(server.port, short, limits.warm, _GRACE))


def _run(row: Row, server: Server, jobs: list[Job], limits: Limits) -> dict[str, Any]:
    before = server.counters()
    gc.collect()
    gc.disable()  # a pause of the client would be the server's
    used, began = time.process_time(), time.perf_counter()
    try:
        answers, last = asyncio.run(_limited(row, server, jobs, limits))
    finally:
        gc.enable()
    share = (time.process_time() - used) / (time.perf_counter() - began)
    found = summary(answers, row.streams or 1, last)
    found["client_share"] = share  # of one processor, requests made ready included
    return found | counted(before, server.counters())


async def _limited(
    row: Row, server: Server, jobs: list[Job], limits: Limits
) -> tuple[list[Answer], float]:
    async with asyncio.timeout(limits.seconds + _GRACE):
        if not row.rate:
            return await closed_loop(server.port, jobs, row.streams, limits.seconds)
        draw, at, times = random.Random(f"arrivals {row.rate}"), 0.0, []
        for _ in jobs:
            times.append(at)
            at += draw.expovariate(row.rate)
        return await arrivals(server.port, jobs, times, limits.seconds)


def _together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of several runs; counts added up."""
    if len(runs) == 1:
        return runs[0]
    good = [run for run in runs if "tokens_per_second" in run] or list(runs)
    result: dict[str, Any] = {}
    for name, value in good[0].items():
        values = [run.get(name) for run in good]
        if isinstance(value, dict) and name != "finish":
            result[name] = {key: _median([v[key] for v in values if v]) for key in value}
        elif name in ("requests", "failed", "tokens"):
            result[name] = sum(run.get(name, 0) for run in runs)
        elif isinstance(value, float):
            result[name] = _median(values)
        else:
            result[name] = value
    speeds = [run.get("tokens_per_second") for run in runs]
    return {**result, "runs": speeds, "failed": sum(run["failed"] for run in runs)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def first_requests(server: Server, workload: Workload) -> dict[str, Any]:
    """Seconds to the first token, one request at a time: of the first eight, of the hundredth."""
    jobs = workload.jobs("greedy", -2, 0, _LATER)
    prompt = workload.sizes.prompt

    async def ask_all() -> list[Answer]:
        found = []
        for job in jobs:
            ids = (job.fields["prompt"] * prompt)[:prompt]  # all of one length
            same = Job(job.path, {**job.fields, "prompt": ids, "max_tokens": 4})
            found.append(await ask(server.port, request_bytes(same)))
        return found

    answers = asyncio.run(ask_all())
    if failed := [answer.error for answer in answers if answer.error]:
        return {"error": failed[0][-300:]}
    seconds = [answer.first_token_seconds for answer in answers]
    last = seconds[-5:]
    return {
        "prompt_tokens": prompt,
        "first": seconds[:_FIRST],
        "first_p50": statistics.median(seconds[:_FIRST]),
        "hundredth": seconds[-1],
        "last_five_p50": statistics.median(last),
        "first_of_last": seconds[0] / statistics.median(last),
    }
