"""What is read at each scrape: what an engine has counted, how it stands, the server's state.

The engine is read from outside of its thread. Nothing is locked: whole numbers and copies of lists
are read at once, and what was accepted is read before what was drafted, so a rate is never above 1.
Two counters may be a step apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import headstart
from headstart.engine.auto.policy import DecidedBy
from headstart.server.metrics.learning import learning_values

if TYPE_CHECKING:
    from headstart.engine.engine import Engine
    from headstart.learn.supervisor import Learning

Values = dict[tuple[str, tuple[str, ...]], float]  # by a metric's name and its labels' values

Health = Literal["starting", "ready", "draining", "dead"]

_WINDOW_SECONDS = 60.0
_SAMPLE_SECONDS = 1.0
_REASONS = (*get_args(DecidedBy), "none")


def counters(engine: Engine) -> Values:
    """Everything that only grows as long as this engine runs."""
    stats, scheduler = engine.stats, engine.scheduler
    cached, computed = stats.cached_tokens, stats.prompt_tokens
    values: Values = {
        ("num_preemptions", ()): scheduler.num_preemptions,
        ("prefix_cache_hits", ()): cached,
        ("prefix_cache_queries", ()): cached + computed,
        ("external_prefix_cache_hits", ()): 0,
        ("external_prefix_cache_queries", ()): 0,
        ("prompt_tokens", ()): cached + computed,
        ("prompt_tokens_by_source", ("local_compute",)): computed,
        ("prompt_tokens_by_source", ("local_cache_hit",)): cached,
        ("prompt_tokens_cached", ()): cached,
        ("generation_tokens", ()): stats.output_tokens,
        ("decode_rounds", ()): stats.rounds.total(),
        ("trunk_seconds", ()): stats.trunk_seconds,
        ("draft_seconds", ()): stats.draft_seconds,
        ("head_swaps", ()): engine.head_version,
    }
    return values | _draft_counters(engine) if engine.policy is not None else values


def _draft_counters(engine: Engine) -> Values:
    acceptance = engine.stats.acceptance
    accepted, drafted = list(acceptance.accepted), list(acceptance.drafted)
    depths = range(max(len(drafted), engine.options.max_drafts))  # all there before the first round
    drafted += [0] * (len(depths) - len(drafted))
    accepted += [0] * (len(depths) - len(accepted))
    chosen = dict.fromkeys(range(len(depths) + 1), 0) | engine.stats.chosen_drafts
    values: Values = {
        ("spec_decode_num_drafts", ()): drafted[0] if drafted else 0,
        ("spec_decode_num_draft_tokens", ()): sum(drafted),
        ("spec_decode_num_accepted_tokens", ()): sum(accepted),
    }
    stats = engine.stats
    for name, total, copied in (
        ("spec_decode_num_draft_tokens_by_source", sum(drafted), stats.copied_drafts),
        ("spec_decode_num_accepted_tokens_by_source", sum(accepted), stats.copied_accepted),
    ):
        values[name, ("head",)] = max(0, total - copied)
        values[name, ("context",)] = copied
    for depth in depths:
        position = (str(depth),)
        values["spec_decode_num_draft_tokens_per_pos", position] = drafted[depth]
        values["spec_decode_num_accepted_tokens_per_pos", position] = accepted[depth]
    for num_drafts, rounds in sorted(chosen.items()):
        values["spec_decode_chosen_drafts", (str(num_drafts),)] = rounds
    return values


def gauges(engine: Engine, num_queued: int) -> Values:
    """How the engine stands now; `num_queued` requests have not reached it yet."""
    scheduler, pool = engine.scheduler, engine.pool
    waiting, deferred = len(scheduler.waiting) + num_queued, scheduler.num_held_back
    config = (
        str(engine.options.block_size), str(pool.num_blocks),
        str(engine.options.prefix_caching), str(engine.model.dtype).removeprefix("torch."),
    )  # fmt: skip
    values: Values = {
        ("num_requests_running", ()): len(scheduler.running),
        ("num_requests_waiting", ()): waiting + deferred,
        ("num_requests_waiting_by_reason", ("capacity",)): waiting,
        ("num_requests_waiting_by_reason", ("deferred",)): deferred,
        ("kv_cache_usage_perc", ()): pool.num_used / pool.num_blocks,
        ("kv_cache_blocks", ("used",)): pool.num_used,
        ("kv_cache_blocks", ("cached",)): pool.num_cached,
        ("kv_cache_blocks", ("free",)): max(0, pool.num_available - pool.num_cached),
        ("cache_config_info", config): 1,
        ("engine_sleep_state", ("awake",)): 1,
        ("head_version", ()): engine.head_version,
    }
    speculation = engine.policy
    reason = speculation.decided_by if speculation is not None else "none"
    values |= {("spec_decode_reason", (name,)): float(name == reason) for name in _REASONS}
    if speculation is not None:
        if speculation.expected_speedup is not None:
            values["spec_decode_expected_speedup", ()] = speculation.expected_speedup
        batch = max(1, len(scheduler.running))
        for drafts in range(engine.options.max_drafts + 1):
            seconds = speculation.round_seconds(batch, drafts)
            if seconds is not None:
                values["round_cost_seconds", (str(drafts),)] = seconds
    return values


@dataclass(frozen=True)
class _Sample:
    seconds: float
    rounds: int
    drafted: int
    accepted: int


class RecentAcceptance:
    """Acceptance over the last minute in which there were rounds."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._latest: Values = {
            ("spec_decode_draft_acceptance_rate", ()): float("nan"),
            ("spec_decode_acceptance_length", ()): float("nan"),
            ("spec_decode_mean_chosen_drafts", ()): float("nan"),
        }

    def observe(self, engine: Engine, now: float) -> None:
        """Take a sample, at most one a second and none while there are no rounds."""
        sample = _sample(engine, now)
        if self._samples:
            last = self._samples[-1]
            if now - last.seconds < _SAMPLE_SECONDS or sample.rounds == last.rounds:
                return
        self._samples.append(sample)
        while len(self._samples) > 2 and now - self._samples[0].seconds > _WINDOW_SECONDS:
            self._samples.popleft()

    def forget(self) -> None:
        """Start again, because another engine counts from 0."""
        self._samples.clear()

    def values(self, engine: Engine) -> Values:
        """Rates up to now; where nothing happened since, those of before."""
        before = self._samples[0] if self._samples else _Sample(0.0, 0, 0, 0)
        now = _sample(engine, 0.0)
        rounds, drafted = now.rounds - before.rounds, now.drafted - before.drafted
        accepted = now.accepted - before.accepted
        if drafted:
            self._latest["spec_decode_draft_acceptance_rate", ()] = accepted / drafted
        if rounds:
            self._latest["spec_decode_acceptance_length", ()] = 1 + accepted / rounds
            self._latest["spec_decode_mean_chosen_drafts", ()] = drafted / rounds
        return dict(self._latest)


def _sample(engine: Engine, now: float) -> _Sample:
    acceptance = engine.stats.acceptance
    accepted = sum(list(acceptance.accepted))
    return _Sample(now, acceptance.rounds, sum(list(acceptance.drafted)), accepted)


class Readings:
    """What is read at a scrape: the server's state, the version, and its engine's own numbers."""

    def __init__(self) -> None:
        self.state: Health = "starting"  # as GET /health gives it
        self.learning: Learning | None = None
        self._engine: Engine | None = None
        self._num_queued: Callable[[], int] = lambda: 0
        self._before: Values = {}  # counters of engines that are gone
        self._recent = RecentAcceptance()

    def attach(self, engine: Engine, *, num_queued: Callable[[], int] | None = None) -> None:
        """Read this engine from now on; `num_queued` counts requests that wait for it.

        After an engine before it the counters go on where they were.
        """
        if self._engine is not None and self._engine is not engine:
            self._before = _sum(self._before, counters(self._engine))
            self._recent.forget()
        self._engine = engine
        self._num_queued = num_queued if num_queued is not None else self._num_queued
        self._recent.observe(engine, time.perf_counter())

    def sample(self) -> None:
        """Keep what is needed for the rates of the last minute; to be called every second."""
        if self._engine is not None:
            self._recent.observe(self._engine, time.perf_counter())

    def values(self) -> Values:
        """All values, by metric and labels."""
        values: Values = {
            ("server_state", (state,)): float(state == self.state) for state in get_args(Health)
        }
        values["build_info", (headstart.__version__,)] = 1
        if self.learning is not None:
            values |= learning_values(self.learning.facts())
        engine = self._engine
        if engine is None:
            return values
        values |= _sum(self._before, counters(engine)) | gauges(engine, self._num_queued())
        return values | (self._recent.values(engine) if engine.policy is not None else {})


def _sum(first: Values, second: Values) -> Values:
    return {series: first.get(series, 0) + second.get(series, 0) for series in {**first, **second}}
