"""Counters and times: of one request, and of a whole engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headstart.sampling.acceptance import Acceptance

if TYPE_CHECKING:
    from headstart.engine.auto.policy import DraftPolicy
    from headstart.engine.flight import MeasuredRound
    from headstart.engine.request import Request


@dataclass
class RequestStats:
    """Counters and times of one request."""

    # Verification rounds, by their numbers of drafts and of accepted drafts.
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    copied_drafts: int = 0  # of all drafts, those that were copied,
    copied_accepted: int = 0  # and were right
    queue_seconds: float | None = None  # until it ran for the first time
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seed: int = 0
    max_tokens: int | None = None  # as resolved: by parameters, model length and memory
    draft_vocab: str | None = None  # None: the whole vocabulary

    def observe(self, num_drafts: int, num_accepted: int, num_of_head: int) -> None:
        """Count one round; drafts after those of the head were copied."""
        self.rounds[num_drafts, num_accepted] += 1
        self.copied_drafts += max(0, num_drafts - num_of_head)
        self.copied_accepted += max(0, num_accepted - num_of_head)

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.rounds)

    @property
    def num_drafted(self) -> int:
        return sum(drafts * count for (drafts, _), count in self.rounds.items())

    @property
    def num_accepted(self) -> int:
        return sum(accepted * count for (_, accepted), count in self.rounds.items())


@dataclass
class EngineStats:
    """Counters of a whole engine since it started."""

    # Verification rounds of requests, by their numbers of drafts and of accepted drafts.
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    copied_drafts: int = 0  # of all drafts, those that were copied,
    copied_accepted: int = 0  # and were right
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # finished with an error of their own
    trunk_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_reason: str = ""  # why the last K was chosen
    # Of each request: rounds in which the host chose nothing (masks of grammars it gives), others.
    fast_rounds: int = 0
    slow_rounds: dict[str, int] = field(default_factory=dict)

    def observe(
        self, num_drafts: int, num_accepted: int, num_of_head: int, why_slow: str | None
    ) -> None:
        """Count one round of one request; drafts after those of the head were copied.

        `why_slow`: why the host had to choose.
        """
        self.rounds[num_drafts, num_accepted] += 1
        self.copied_drafts += max(0, num_drafts - num_of_head)
        self.copied_accepted += max(0, num_accepted - num_of_head)
        if why_slow is None:
            self.fast_rounds += 1
        else:
            self.slow_rounds[why_slow] = self.slow_rounds.get(why_slow, 0) + 1

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.rounds.copy())  # the engine may be counting meanwhile

    @property
    def chosen_drafts(self) -> Counter[int]:
        """Rounds by their number of drafts."""
        chosen: Counter[int] = Counter()
        for (drafts, _), count in self.rounds.copy().items():
            chosen[drafts] += count
        return chosen

    def clear(self) -> None:
        """Count from here on."""
        vars(self).update(vars(EngineStats()))


@dataclass
class StepTimes:
    """How long passes and whole steps take, for the policy that chooses drafts by it."""

    stats: EngineStats
    policy: DraftPolicy | None
    besides: float = 0.0  # of the last step that the host drove: what its passes did not take
    _began: float = 0.0
    _pass_seconds: float = 0.0  # of trunk and head in this step
    _is_decoding: bool = False  # whether no request of the last pass read its prompt

    def begin(self) -> None:
        self._began, self._pass_seconds = time.perf_counter(), 0.0

    def trunk(self, requests: Sequence[Request], rows: int, seconds: float) -> None:
        """A pass over so many rows of these requests, and what was chosen of it."""
        self.stats.trunk_seconds += seconds
        self._pass_seconds += seconds
        self._is_decoding = all(request.is_decoding for request in requests)
        if self.policy is not None and self._is_decoding:
            self.policy.observe_verify(requests, rows, seconds)

    def drafts(self, of_head: float, seconds: float) -> None:
        """Drafting in all, and the head's part of it."""
        self._pass_seconds += of_head
        self.stats.draft_seconds += seconds

    def round(self, measured: MeasuredRound | None) -> None:
        """A round on the device, where its time counts."""
        if measured is not None and self.policy is not None:
            self.policy.observe_round(
                measured.size, measured.num_drafts, measured.context, measured.seconds
            )

    def end(self) -> None:
        """Of a step in which requests decoded: what it took besides."""
        self.besides = max(0.0, time.perf_counter() - self._began - self._pass_seconds)
        if self._is_decoding and self.policy is not None:
            self.policy.observe_overhead(self.besides)
