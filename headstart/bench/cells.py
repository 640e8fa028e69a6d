"""A cell of the table: one variant under one load, all repeats together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headstart.bench.cost import Prices
from headstart.bench.measures import (
    Limits,
    Measures,
    chunk_gaps_seconds,
    latency_seconds,
    measure,
    quantile,
    token_gaps_seconds,
    tpot_seconds,
    ttft_seconds,
)
from headstart.bench.records import RequestRecord, RunRecord, Speculation, VariantRecord
from headstart.bench.response_counters import total_speculation
from headstart.bench.statistics import Sample
from headstart.bench.words import stream_words

QUANTILES = tuple(place / 100 for place in range(101))
_MOST_WORDS = 5


@dataclass(frozen=True, order=True)
class Point:
    """A load: streams of a closed loop, or conversations per second of an open one."""

    rate: float = 0.0  # 0: a closed loop
    concurrency: int = 0  # 0: an open loop without a limit

    @property
    def is_open(self) -> bool:
        return self.rate > 0

    @property
    def name(self) -> str:
        if self.is_open:
            limit = f", at most {self.concurrency} at once" if self.concurrency else ""
            return f"{self.rate:g} per second{limit}"
        return stream_words(self.concurrency)

    def as_json(self) -> dict[str, Any]:
        return {"concurrency": self.concurrency or None, "rate": self.rate or None}


@dataclass(frozen=True)
class Cell:
    variant: str
    point: Point
    runs: tuple[RunRecord, ...]
    measures: Measures
    speculation: Speculation | None
    task: str | None = None

    @property
    def where(self) -> str:
        """The task, or the load: what tells cells of a variant apart."""
        return self.task or self.point.name

    @property
    def requests(self) -> list[tuple[int, RequestRecord]]:
        """Whole answers with the repeat they belong to."""
        return [(run.repeat, request) for run in self.runs for request in run.answered]

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, those that the server had in its prefix cache."""
        requests = [request for _, request in self.requests]
        prompt = sum(request.prompt_tokens or 0 for request in requests)
        return sum(request.cached_tokens or 0 for request in requests) / prompt if prompt else 0.0

    def samples(self, what: str) -> list[Sample]:
        """`tokens` over the seconds of each request, or a latency of each that has it."""
        found = []
        for repeat, request in self.requests:
            seconds = _LATENCIES["latency" if what == "tokens" else what](request)
            if seconds is None:
                continue
            if what == "tokens":
                found.append(Sample(request.id, repeat, request.output_tokens, seconds))
            else:
                found.append(Sample(request.id, repeat, seconds))
        return found

    def as_json(self, prices: Prices | None) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "task": self.task,
            **self.point.as_json(),
            "measures": asdict(self.measures),
            "speculation": speculation_json(self.speculation),
            "cost": None if prices is None else costs(self.measures, prices),
            "cached_share": self.cached_share,
            "quantiles": self._quantiles(),
            "runs": [_run_json(run) for run in self.runs],
            "requests": [_request_json(repeat, request) for repeat, request in self.requests],
        }

    def _quantiles(self) -> dict[str, list[float]]:
        """Values at 0, 1, ... 100 %; for curves."""
        requests = [request for _, request in self.requests]
        values: dict[str, list[float]] = {
            f"{name}_seconds": sorted(v for r in requests if (v := of(r)) is not None)
            for name, of in _LATENCIES.items()
        }
        values["itl_per_token_seconds"] = sorted(g for r in requests for g in token_gaps_seconds(r))
        values["itl_per_chunk_seconds"] = sorted(g for r in requests for g in chunk_gaps_seconds(r))
        return {
            name: [quantile(ordered, share) for share in QUANTILES]
            for name, ordered in values.items()
            if ordered
        }


_LATENCIES = {"ttft": ttft_seconds, "tpot": tpot_seconds, "latency": latency_seconds}


def make_cells(
    variants: Sequence[VariantRecord], limits: Limits | None, *, task: str | None = None
) -> list[Cell]:
    """Every variant under every load it was measured with, loads in order."""
    cells = []
    for variant in variants:
        by_point: dict[Point, list[RunRecord]] = {}
        for run in variant.runs:
            point = Point(run.rate or 0.0, run.concurrency or 0)
            by_point.setdefault(point, []).append(run)
        for point in sorted(by_point):
            runs = tuple(by_point[point])
            counted = total_speculation(run.speculation for run in runs)
            cells.append(Cell(variant.name, point, runs, _pooled(runs, limits), counted, task))
    return cells


def _pooled(runs: Sequence[RunRecord], limits: Limits | None) -> Measures:
    """Figures of all repeats: their tokens over their time, spreads over all their requests."""
    whole = RunRecord(
        variant=runs[0].variant,
        concurrency=runs[0].concurrency,
        rate=runs[0].rate,
        started_at=runs[0].started_at,
        duration_seconds=sum(run.duration_seconds for run in runs),
        requests=tuple(request for run in runs for request in run.requests),
    )
    return measure(whole, limits)


def speculation_json(found: Speculation | None) -> dict[str, Any] | None:
    """Counters, and the rates made of them."""
    if found is None:
        return None
    return {
        **asdict(found),
        "acceptance_length": found.acceptance_length,
        "draft_acceptance_rate": found.draft_acceptance_rate,
        "copied_share": found.copied_share,
        "cumulative_acceptance": list(found.cumulative),
        "conditional_acceptance": list(found.conditional),
    }


def costs(measures: Measures, prices: Prices) -> dict[str, Any]:
    total = measures.total_tokens_per_second
    return {
        "per_million_output_tokens": prices.per_million_tokens(measures.output_tokens_per_second),
        "per_million_total_tokens": None if total is None else prices.per_million_tokens(total),
    }


def _run_json(run: RunRecord) -> dict[str, Any]:
    return {
        "repeat": run.repeat,
        "started_at": run.started_at,
        "duration_seconds": run.duration_seconds,
        "warm_up_requests": run.num_warm_up,
        "lag": {**asdict(run.lag), "is_large": run.lag.is_large},
        "failures": run.failures,
        "failure_words": sorted({r.failure.words for r in run.requests if r.failure})[:_MOST_WORDS],
        "counted_by": sorted({request.counted_by for request in run.answered}),
        "cached_tokens": sum(request.cached_tokens or 0 for request in run.answered),
        "notes": list(run.notes),
    }


def _request_json(repeat: int, request: RequestRecord) -> dict[str, Any]:
    """What `bench diff` needs to tell a change from noise; no texts."""
    return {
        "id": request.id,
        "category": request.category,
        "repeat": repeat,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "ttft_seconds": ttft_seconds(request),
        "tpot_seconds": tpot_seconds(request),
        "latency_seconds": latency_seconds(request),
    }
