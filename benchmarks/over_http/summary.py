"""What answers say about a server: tokens per second, and times at 50 and 99 percent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from over_http.client import Answer

_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_MEANS = {
    "server_first_token_seconds": "vllm:time_to_first_token_seconds",
    "server_token_seconds": "vllm:request_time_per_output_token_seconds",
}
_ROUNDS = "headstart:decode_rounds_total"  # of each request; vLLM does not count those
_DECODING = "vllm:request_decode_time_seconds_sum"
_WANTED = {_ACCEPTED, _DRAFTS, _ROUNDS, _DECODING} | {
    f"{n}_{end}" for n in _MEANS.values() for end in ("sum", "count")
}


def percentile(values: Sequence[float], share: float) -> float | None:
    """Between the two nearest values; None where there are none."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def tokens_between(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Output tokens in a stretch of time; those of one answer come evenly after its first."""
    found = 0.0
    for answer in answers:
        found += begin <= answer.first < end
        length = answer.ended - answer.first
        overlap = min(end, answer.ended) - max(begin, answer.first)
        if overlap > 0 and length > 0:
            found += (answer.tokens - 1) * overlap / length
    return found


def summary(answers: Sequence[Answer], streams: int, last: float) -> dict[str, Any]:
    """Speed while all streams were busy: from the first tokens of all to the last request's start.

    `whole_tokens_per_second` is the same from the first request to the end of the last answer.
    """
    good = [answer for answer in answers if not answer.error]
    errors = [answer.error for answer in answers if answer.error]
    found: dict[str, Any] = {"requests": len(good), "failed": len(errors)}
    if errors:
        found["error"] = errors[0][-300:]
    if not good:
        return found
    began, ended = min(a.sent for a in good), max(a.ended for a in good)
    tokens = sum(answer.tokens for answer in good)
    whole = tokens / (ended - began)
    busy = sorted(answer.first for answer in good)[min(streams, len(good)) - 1]
    steady = whole
    if last - busy > 0.25 * (ended - began):
        steady = tokens_between(good, busy, last) / (last - busy)
    first = [answer.first_token_seconds for answer in good]
    each = [answer.token_seconds for answer in good if answer.token_seconds is not None]
    return {
        **found,
        "tokens": tokens,
        "seconds": ended - began,
        "tokens_per_second": steady,
        "whole_tokens_per_second": whole,
        "first_token_seconds": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "token_seconds": {"p50": percentile(each, 0.5), "p99": percentile(each, 0.99)},
        "finish": dict(Counter(answer.finish for answer in good)),
    }


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """What the servers' counters say: tokens per round that drafted, means, seconds of a round.

    Rounds in which a grammar refused all drafts are none that drafted, in both servers.
    """
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in _WANTED}
    drafts = grown[_DRAFTS]
    found: dict[str, float | None] = {
        "acceptance_length": 1 + grown[_ACCEPTED] / drafts if drafts else None
    }
    rounds = grown[_ROUNDS]
    found["tokens_per_round"] = 1 + grown[_ACCEPTED] / rounds if rounds else None
    found["round_seconds"] = grown[_DECODING] / rounds if rounds else None
    for ours, theirs in _MEANS.items():
        number = grown[f"{theirs}_count"]
        found[ours] = grown[f"{theirs}_sum"] / number if number else None
    return found


def counters(page: str) -> dict[str, float]:
    """Numbers of a /metrics page by name, labels added up."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].split(" ")[0]
        if name in _WANTED:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found
