"""What the server counts. `exposition.py` shows it to Prometheus.

How it is used:

    metrics = ServerMetrics("my-model")           one per server; nothing is global
    metrics.attach(engine, num_queued=len_inbox)  when an engine is there, and again after a rebuild
    metrics.set_state("ready")                    starting (at first), ready, draining, dead
    metrics.request_started(id, arrived=...)      the request is handed to the engine
    metrics.tokens(id, sample, count)             each update of the engine that has tokens
    metrics.request_finished(result)              each collected `Result`, aborted ones included
    metrics.request_failed(id)                    no result will come (the engine is gone)
    metrics.observe_step(seconds, num_tokens)     after each `engine.step()`, in its thread
    metrics.http_request(handler, method, status, seconds)     each answer, refusals included
    MetricsPage(metrics).render()                 body and content type of GET /metrics

Everything may be called from any thread. Times are `time.perf_counter()`. Counters of the engine
are read from it at each scrape; after `attach` with another engine they go on where they were.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric as Family

import headstart
from headstart.server.metrics.engine_reading import Values, counters, gauges
from headstart.server.metrics.table import COMMON_LABELS, METRICS, OTHER, Metric

if TYPE_CHECKING:
    from headstart.engine.engine import Engine
    from headstart.engine.output import Completion, Result

_WINDOW_SECONDS = 60.0
_SAMPLE_SECONDS = 1.0
_EVENT_COUNTERS = ("request_success", "http_requests", "http_responses")
Health = Literal["starting", "ready", "draining", "dead"]


class Events:
    """Counters and histograms that are told what happened; the engine's own are read instead."""

    def __init__(self, common: Mapping[str, str]):
        self._registry = CollectorRegistry()
        self.common = dict(common)
        # All at once: made on first use, two threads could make the same one.
        self._counters = {name: self._counter(METRICS[name]) for name in _EVENT_COUNTERS}
        self._histograms = {
            name: self._histogram(metric)
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
        }
        for name in self._histograms:
            if not METRICS[name].labels:
                self.histogram(name)  # exposed with 0, not only after the first observation

    def _counter(self, metric: Metric) -> Counter:
        labels = (*COMMON_LABELS, *metric.label_names)
        return Counter(metric.own, metric.help, labels, registry=self._registry)

    def _histogram(self, metric: Metric) -> Histogram:
        labels = (*COMMON_LABELS, *metric.label_names)
        return Histogram(
            metric.own, metric.help, labels, registry=self._registry, buckets=metric.buckets
        )

    def counter(self, name: str, **labels: str) -> Counter:
        """A counter's series; it is exposed from the first call on, with 0."""
        return self._counters[name].labels(**self.common, **bounded(METRICS[name], labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """A histogram's series, to observe values with."""
        return self._histograms[name].labels(**self.common, **bounded(METRICS[name], labels))

    def families(self) -> Iterator[Family]:
        yield from self._registry.collect()


def bounded(metric: Metric, given: Mapping[str, str]) -> dict[str, str]:
    """The values of a metric's labels by name: each as given if the table lists it, else OTHER."""
    found = {}
    for label in metric.labels:
        value = given[label.name]
        found[label.name] = value if not label.values or value in label.values else OTHER
    return found


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

    def observe(self, engine: Engine, now: float | None = None) -> None:
        """Take a sample, at most one a second."""
        now = time.perf_counter() if now is None else now
        if self._samples and now - self._samples[-1].seconds < _SAMPLE_SECONDS:
            return
        self._samples.append(_sample(engine, now))
        while len(self._samples) > 2 and now - self._samples[0].seconds > _WINDOW_SECONDS:
            self._samples.popleft()

    def forget(self) -> None:
        """Another engine counts from 0."""
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


@dataclass
class _Track:
    """When things happened to a request that is on its way."""

    arrived: float
    num_samples: int
    latest: dict[int, float] = field(default_factory=dict)  # when a sample last got tokens


class ServerMetrics:
    """What one server has counted; MetricsPage exposes it."""

    def __init__(self, model_name: str):
        self.events = Events({"model_name": model_name, "engine": "0"})
        self._engine: Engine | None = None
        self._num_queued: Callable[[], int] = lambda: 0
        self._before: Values = {}  # counters of engines that are gone
        self._recent = RecentAcceptance()
        self._tracks: dict[str, _Track] = {}
        self._state: Health = "starting"
        self._prompt_tokens = 0  # before the latest step
        (finished,) = METRICS["request_success"].labels
        for reason in finished.values:
            self.events.counter("request_success", finished_reason=reason)
        histogram = self.events.histogram
        self._first_token = histogram("time_to_first_token_seconds")
        self._between = histogram("inter_token_latency_seconds")
        self._step_seconds = histogram("step_duration_seconds")
        self._tokens_per_step = histogram("iteration_tokens_total")

    def attach(self, engine: Engine, *, num_queued: Callable[[], int] | None = None) -> None:
        """Read counters from this engine; `num_queued` counts requests it has not seen yet."""
        if self._engine is not None and self._engine is not engine:
            self._before = _sum(self._before, counters(self._engine))
            self._recent.forget()
        self._engine = engine
        self._num_queued = num_queued if num_queued is not None else self._num_queued
        self._prompt_tokens = engine.stats.prompt_tokens
        self._recent.observe(engine)

    def set_state(self, state: Health) -> None:
        """What /health says."""
        self._state = state

    def request_started(
        self, request_id: str, *, arrived: float | None = None, n: int = 1,
        max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """A request goes to the engine; `arrived` is when its first byte was read."""
        self._tracks[request_id] = _Track(time.perf_counter() if arrived is None else arrived, n)
        self.events.histogram("request_params_n").observe(n)
        if max_tokens is not None:
            self.events.histogram("request_params_max_tokens").observe(max_tokens)

    @property
    def num_tracked(self) -> int:
        """Requests that have started and not ended."""
        return len(self._tracks)

    def tokens(self, request_id: str, sample: int, count: int) -> None:
        """An update brought `count` tokens of one sample; unknown requests are ignored."""
        track = self._tracks.get(request_id)
        if track is None or not count:
            return
        now, before = time.perf_counter(), track.latest.get(sample)
        track.latest[sample] = now
        if before is None:
            self._first_token.observe(now - track.arrived)
        else:
            self._between.observe(now - before)

    def request_finished(self, result: Result) -> None:
        """All samples of a request have ended, whatever the reason."""
        track = self._tracks.pop(result.request_id, None)
        for output in result.outputs:
            reason = output.finish_reason or "error"
            self.events.counter("request_success", finished_reason=reason).inc()
        whole = [o for o in result.outputs if o.finish_reason in ("stop", "length")]
        if track is None or not whole:
            return
        longest = max(len(output.token_ids) for output in whole)
        self.events.histogram("request_max_num_generation_tokens").observe(longest)
        for output in whole:
            self._observe_sample(track, len(result.prompt_token_ids), output)

    def _observe_sample(self, track: _Track, num_prompt: int, output: Completion) -> None:
        stats, histogram = output.stats, self.events.histogram
        cached = min(stats.num_cached_tokens, num_prompt)
        histogram("request_prompt_tokens").observe(num_prompt)
        histogram("request_prefill_kv_computed_tokens").observe(num_prompt - cached)
        histogram("request_generation_tokens").observe(len(output.token_ids))
        whole = track.latest.get(output.index, time.perf_counter()) - track.arrived
        histogram("e2e_request_latency_seconds").observe(whole)
        if stats.total_seconds is None or stats.first_token_seconds is None:
            return
        queued, first = stats.queue_seconds or 0.0, stats.first_token_seconds
        running, decoding = stats.total_seconds - queued, stats.total_seconds - first
        # What the engine did not see, from arrival to submission, was waiting as well.
        histogram("request_queue_time_seconds").observe(max(0.0, whole - running))
        histogram("request_prefill_time_seconds").observe(first - queued)
        histogram("request_decode_time_seconds").observe(decoding)
        histogram("request_inference_time_seconds").observe(running)
        if len(output.token_ids) > 1:
            each = decoding / (len(output.token_ids) - 1)
            histogram("request_time_per_output_token_seconds").observe(each)

    def request_failed(self, request_id: str) -> None:
        """A request ended with an error and without a result."""
        track = self._tracks.pop(request_id, None)
        if track is not None:
            ended = self.events.counter("request_success", finished_reason="error")
            ended.inc(track.num_samples)

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        """One step of the engine took so long, and `num_tokens` were given out."""
        if self._engine is None:
            return
        prompts, before = self._engine.stats.prompt_tokens, self._prompt_tokens
        self._tokens_per_step.observe(prompts - before + num_tokens)
        self._prompt_tokens = prompts
        self._step_seconds.observe(seconds)
        self._recent.observe(self._engine)

    def http_request(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        """One answer; `handler` is the route's template, None where no route matched."""
        # Paths that clients make up must not become series; the table of metrics sees to methods.
        route = {"handler": handler or "none", "method": method if handler else "none"}
        self.events.counter("http_requests", status=f"{status // 100}xx", **route).inc()
        self.events.counter("http_responses", code=str(status), **route).inc()
        self.events.histogram("http_request_duration_seconds", **route).observe(seconds)

    def values(self) -> Values:
        """Everything that is read at the time of a scrape: state, version, the engine's own."""
        values: Values = {
            ("server_state", (state,)): float(state == self._state) for state in get_args(Health)
        }
        values["build_info", (headstart.__version__,)] = 1
        engine = self._engine
        if engine is None:
            return values
        values |= _sum(self._before, counters(engine)) | gauges(engine, self._num_queued())
        return values | (self._recent.values(engine) if engine.policy is not None else {})


def _sum(first: Values, second: Values) -> Values:
    return {series: first.get(series, 0) + second.get(series, 0) for series in {**first, **second}}
