"""What a benchmark keeps: one request's timeline, one run, one variant's runs.

Facts only, as they were seen from outside of the server; measures.py makes figures of them. Times
are seconds of one clock that begins with the run's first measured request, warm-up left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

# How the tokens of each chunk became known, best first.
TokenCount = Literal["token_ids", "usage", "origins", "tokenizer", "spread", "chunks", "none"]
TOKEN_COUNTS: dict[TokenCount, str] = {
    "token_ids": "the server sent every chunk's token ids",
    "usage": "the server sent the number of tokens with every chunk",
    "origins": "the server sent the origin of every token",
    "tokenizer": "the text of every chunk was tokenised again",
    "spread": "the total is the server's; it was spread over the chunks by length of text",
    "chunks": "every chunk was taken for one token, for want of anything better",
    "none": "no chunk came",
}
FailureKind = Literal[
    "connection",  # no connection, or it broke before an answer began
    "timeout",  # the answer was not complete in time
    "busy",  # status 429: the server takes no more
    "server_error",  # status 500 or above
    "refused",  # any other status that is not 200
    "stream_error",  # the server sent an error in the middle of a stream
    "malformed",  # a chunk, or an answer, that is not what the API promises
    "cut",  # the stream ended before the answer did
    "empty",  # a complete answer without a token
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no whole answer."""

    kind: FailureKind
    words: str  # the server's own, shortened, or what was found
    status: int | None = None
    retry_after_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """What became of drafts, as a server counted it; None for what it does not say.

    Rates are `cumulative` (the draft and all before it were right) or `conditional` (given that
    those before it were).
    """

    source: str  # `responses`, or the engine that /metrics names: headstart, vllm, sglang, ...
    rounds: int | None = None  # verification rounds of requests; see has_plain_rounds
    has_plain_rounds: bool = False  # whether `rounds` has those without drafts in it
    draft_tokens: int | None = None
    accepted_tokens: int | None = None  # recovered and bonus tokens are not among them
    copied_tokens: int | None = None  # of these, drafts that were copied from the context
    drafted_per_depth: tuple[int, ...] = ()
    accepted_per_depth: tuple[int, ...] = ()
    tried_per_depth: tuple[int, ...] = ()  # drafted there, and everything before it accepted
    output_tokens: int | None = None  # only where it stands in for accepted_tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, the recovered or bonus one included; 1 is plain decoding."""
        if not self.rounds:
            return None
        if self.accepted_tokens is not None:
            return 1 + self.accepted_tokens / self.rounds
        return None if self.output_tokens is None else self.output_tokens / self.rounds

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted; falls with K by itself, so compare it at equal K only."""
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    @property
    def copied_share(self) -> float | None:
        """Of all accepted drafts, those that were copied from the context."""
        if not self.accepted_tokens or self.copied_tokens is None:
            return None
        return self.copied_tokens / self.accepted_tokens

    @property
    def cumulative(self) -> tuple[float, ...]:
        """By depth; over the rounds that drafted so deep where those are known, else over all."""
        deepest = len(self.accepted_per_depth)
        drafted = self._beside(self.drafted_per_depth) or (self.rounds or 0,) * deepest
        return tuple(
            accepted / rounds if rounds else 0.0
            for accepted, rounds in zip(self.accepted_per_depth, drafted, strict=True)
        )

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """By depth; None where the number of tries was not counted."""
        tried = self._beside(self.tried_per_depth) or self._tried()
        return tuple(
            None if rounds is None else accepted / rounds if rounds else 0.0
            for accepted, rounds in zip(self.accepted_per_depth, tried, strict=True)
        )

    @property
    def num_rates(self) -> int:
        """How much is known about depths."""
        return len(self.cumulative) + sum(rate is not None for rate in self.conditional)

    def _tried(self) -> list[int | None]:
        """Worked out where it can be: a depth that was drafted as often as the one before it was
        tried whenever that one was accepted. With several K that is true of the first one only."""
        accepted, drafted = self.accepted_per_depth, self._beside(self.drafted_per_depth)
        if drafted:
            is_alike = [one == other for one, other in pairwise(drafted)]
        else:
            # The number of drafts alone tells whether all rounds drafted equally many.
            is_alike = [self.draft_tokens == (self.rounds or 0) * len(accepted)] * len(accepted)
        first = drafted[0] if drafted else None if self.has_plain_rounds else self.rounds
        later = [n if alike else None for n, alike in zip(accepted[:-1], is_alike, strict=False)]
        return [first, *later][: len(accepted)]

    def _beside(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Nothing where a server counted other depths than those that it accepted at."""
        return counts if len(counts) == len(self.accepted_per_depth) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request's timeline and answer. A chunk is an event with text or tokens in it."""

    id: str  # the same request of another run has the same id
    conversation: str  # the id of the question whose turn this is
    category: str = "general"
    turn: int = 0  # of its conversation, from 0
    due_seconds: float  # when the plan had it; sent then or later
    sent_seconds: float
    chunk_seconds: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()  # beside chunk_seconds
    end_seconds: float  # the stream's end, or the failure
    counted_by: TokenCount = "none"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, as the server says
    max_tokens: int | None = None
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    speculation: Speculation | None = None  # as the response had it
    failure: Failure | None = None

    @property
    def is_answered(self) -> bool:
        return self.failure is None

    @property
    def output_tokens(self) -> int:
        return sum(self.chunk_tokens)


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How late the load generator itself was: a timer's wake-ups against what they should be."""

    median_seconds: float = 0.0
    p99_seconds: float = 0.0
    max_seconds: float = 0.0
    limit_seconds: float = 0.0  # what p99 may be, given how quickly chunks came
    busy_share: float = 0.0  # processor time over time, of the thread that read the streams

    @property
    def is_large(self) -> bool:
        return self.p99_seconds > self.limit_seconds


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One load on one variant."""

    variant: str
    repeat: int = 0
    concurrency: int | None = None  # streams of a closed loop, or the limit of an open one
    rate: float | None = None  # conversations per second of an open loop
    started_at: str  # UTC, ISO 8601
    duration_seconds: float  # from the first request to the end of the last one
    requests: tuple[RequestRecord, ...]  # in the order of sending, without warm-up
    num_warm_up: int = 0
    lag: Lag = field(default_factory=Lag)
    speculation: Speculation | None = None  # /metrics after less before; else of the responses
    notes: tuple[str, ...] = ()  # what a reader must know; also shown

    @property
    def is_valid(self) -> bool:
        """Whether the times are the server's rather than the load generator's."""
        return not self.lag.is_large

    @property
    def answered(self) -> tuple[RequestRecord, ...]:
        return tuple(request for request in self.requests if request.is_answered)

    @property
    def failures(self) -> dict[FailureKind, int]:
        """Only kinds that happened."""
        counts: dict[FailureKind, int] = {}
        for request in self.requests:
            if request.failure is not None:
                counts[request.failure.kind] = counts.get(request.failure.kind, 0) + 1
        return counts


@dataclass(frozen=True, kw_only=True)
class VariantRecord:
    """All runs of one thing that is compared, in the order they were made."""

    name: str
    url: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # what its requests say besides
    runs: tuple[RunRecord, ...] = ()
