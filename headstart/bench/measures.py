"""Latencies and throughput of records: pure functions, one definition each.

TTFT    from sending to the first chunk with text or tokens (a chunk that only says `assistant` is
        not one)
TPOT    (last chunk - first chunk) / (tokens - 1), per request, as `vllm bench serve` and SGLang
        define it; None for answers of one token
ITL     per chunk: the gap between two chunks, as vLLM reports it; per token: that gap shared among
        the second chunk's tokens, as SGLang does. They differ by the tokens a chunk holds.
latency from sending to the last chunk

Requests that failed are in none of these, and their tokens not in the throughput: they are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headstart.bench.records import FailureKind, RequestRecord, RunRecord
from headstart.bench.words import positive_number
from headstart.errors import ConfigError

_LIMITED = ("ttft", "tpot", "latency")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A sample in a few numbers, in the unit of its values."""

    count: int
    mean: float
    std: float
    min: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may take to count as good; None does not matter."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    latency_seconds: float | None = None

    def are_met_by(self, request: RequestRecord) -> bool:
        """An answer of one token has no TPOT and so meets any limit on it."""
        if not request.is_answered:
            return False
        found = (ttft_seconds(request), tpot_seconds(request), latency_seconds(request))
        limits = (self.ttft_seconds, self.tpot_seconds, self.latency_seconds)
        return all(
            limit is None or value is None or value <= limit
            for value, limit in zip(found, limits, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The figures of one run. A spread is None where no request has such a value."""

    num_requests: int
    num_answered: int
    failures: dict[FailureKind, int]
    duration_seconds: float
    prompt_tokens: int | None  # None: the server does not say
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float | None
    tokens_per_chunk: float | None  # chunks after the first of their answer
    mean_concurrency: float
    ttft_seconds: Spread | None
    tpot_seconds: Spread | None
    itl_per_token_seconds: Spread | None
    itl_per_chunk_seconds: Spread | None
    latency_seconds: Spread | None
    wait_seconds: Spread | None  # from due to sent: only an open loop with a limit has any
    good_requests_per_second: float | None  # goodput; None without limits
    good_output_tokens_per_second: float | None


def measure(run: RunRecord, limits: Limits | None = None) -> Measures:
    answered, seconds = run.answered, run.duration_seconds
    prompt_tokens = _total_prompt(answered)
    output_tokens = sum(request.output_tokens for request in answered)
    later = [n for request in answered for n in request.chunk_tokens[1:]]
    good = [r for r in answered if limits.are_met_by(r)] if limits is not None else None
    good_tokens = None if good is None else sum(request.output_tokens for request in good)

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return Measures(
        num_requests=len(run.requests),
        num_answered=len(answered),
        failures=run.failures,
        duration_seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=per_second(len(answered)),
        output_tokens_per_second=per_second(output_tokens),
        total_tokens_per_second=(
            None if prompt_tokens is None else per_second(prompt_tokens + output_tokens)
        ),
        tokens_per_chunk=sum(later) / len(later) if later else None,
        mean_concurrency=per_second(sum(r.end_seconds - r.sent_seconds for r in run.requests)),
        ttft_seconds=spread(map(ttft_seconds, answered)),
        tpot_seconds=spread(map(tpot_seconds, answered)),
        itl_per_token_seconds=spread(gap for r in answered for gap in token_gaps_seconds(r)),
        itl_per_chunk_seconds=spread(gap for r in answered for gap in chunk_gaps_seconds(r)),
        latency_seconds=spread(map(latency_seconds, answered)),
        wait_seconds=spread(request.sent_seconds - request.due_seconds for request in answered),
        good_requests_per_second=None if good is None else per_second(len(good)),
        good_output_tokens_per_second=None if good_tokens is None else per_second(good_tokens),
    )


def ttft_seconds(request: RequestRecord) -> float | None:
    if not request.chunk_seconds:
        return None
    return request.chunk_seconds[0] - request.sent_seconds


def tpot_seconds(request: RequestRecord) -> float | None:
    tokens = request.output_tokens
    if tokens < 2:
        return None
    return (request.chunk_seconds[-1] - request.chunk_seconds[0]) / (tokens - 1)


def latency_seconds(request: RequestRecord) -> float | None:
    if not request.chunk_seconds:
        return None
    return request.chunk_seconds[-1] - request.sent_seconds


def chunk_gaps_seconds(request: RequestRecord) -> list[float]:
    return [later - earlier for earlier, later in pairwise(request.chunk_seconds)]


def token_gaps_seconds(request: RequestRecord) -> list[float]:
    """Each gap as many times as its chunk has tokens, shared among them."""
    gaps = zip(chunk_gaps_seconds(request), request.chunk_tokens[1:], strict=True)
    return [gap / tokens for gap, tokens in gaps for _ in range(tokens)]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are not None."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    return Spread(
        count=len(ordered),
        mean=mean,
        std=math.sqrt(variance),
        min=ordered[0],
        median=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, with straight lines between them (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def parse_limits(text: str) -> Limits:
    """`ttft:200,tpot:20` in milliseconds, as `vllm bench serve --goodput` has them."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition(":")
        value = positive_number(number)
        if name not in _LIMITED or value is None or name in found:
            raise ConfigError(
                f"the limit {part!r} cannot be read; give milliseconds as in ttft:200,tpot:20 "
                f"(each of {', '.join(_LIMITED)} at most once)."
            )
        found[name] = value / 1000
    if not found:
        raise ConfigError("no limit is given; give milliseconds as in ttft:200,tpot:20.")
    return Limits(**{f"{name}_seconds": value for name, value in found.items()})


def _total_prompt(requests: Sequence[RequestRecord]) -> int | None:
    counts = [request.prompt_tokens for request in requests]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
