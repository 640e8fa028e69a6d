"""What an engine hands back: results of whole requests, and updates while they run."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.engine.request import FinishReason
from headstart.engine.stats import RequestStats
from headstart.sampling.acceptance import Origin


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token and of the best alternatives at its place."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass
class Completion:
    """One sample."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    origins: list[Origin]  # of every token; without drafts all are bonus
    logprobs: list[TokenLogprob] | None
    stats: RequestStats
    error: str | None = None  # of a request that ended with finish_reason "error"


@dataclass
class Result:
    """The answer to one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)

    @property
    def stats(self) -> RequestStats:
        """Of the first sample; every sample has its own."""
        return self.outputs[0].stats


@dataclass(frozen=True)
class Update:
    """What one step added to one sample."""

    request_id: str
    sample: int
    token_ids: list[int]
    text: str
    origins: list[Origin]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    error: str | None = None
    stop_reason: str | int | None = None  # the text or token that ended it
