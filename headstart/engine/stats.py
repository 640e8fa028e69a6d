"""Acceptance counters and times, of a request and of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.simulate.acceptance import Acceptance

__all__ = ["Acceptance", "EngineStats", "RequestStats"]


@dataclass
class RequestStats:
    """Counters and times of one request."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    queue_seconds: float | None = None  # until it ran for the first time
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seed: int = 0
    max_tokens: int | None = None  # as resolved: by parameters, model length and memory
    draft_vocab: str | None = None  # None: the whole vocabulary


@dataclass
class EngineStats:
    """Counters of a whole engine since it started."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # finished with an error of their own
    trunk_seconds: float = 0.0
    draft_seconds: float = 0.0
    chosen_drafts: dict[int, int] = field(default_factory=dict)  # K -> rounds
    draft_reason: str = ""  # why the last K was chosen
