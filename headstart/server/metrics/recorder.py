"""What the server counts, and how /metrics shows it.

Who calls what:

    metrics = ServerMetrics("my-model")           one per server; nothing is global
    metrics.attach(engine, num_queued=len_inbox)  when an engine is there, and again after a rebuild
    metrics.set_state("ready")                    starting (at first), ready, draining, dead
    metrics.request_started(id, arrived=...)      the request is handed to the engine
    metrics.tokens(id, sample, count)             each update of the engine that has tokens
    metrics.request_finished(result)              each collected `Result`, aborted ones included
    metrics.request_failed(id)                    no result will come (the engine is gone)
    metrics.observe_step(seconds, num_tokens)     after each `engine.step()`, in its thread
    metrics.http_request(handler, method, status, seconds)     each answer, refusals included
    metrics.render()                              body and content type of GET /metrics

Everything may be called from any thread. Times are `time.perf_counter()`. Counters of the engine
are read from it when somebody asks; after `attach` with another engine they go on where they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

import headstart
from headstart.server.metrics.engine_reading import RecentAcceptance, Values, counters, gauges
from headstart.server.metrics.exposition import Events, Exposition
from headstart.server.metrics.table import METRICS

if TYPE_CHECKING:
    from headstart.engine.engine import Engine
    from headstart.engine.outputs import Completion, Result

Health = Literal["starting", "ready", "draining", "dead"]


@dataclass
class _Track:
    """When things happened to a request that is on its way."""

    arrived: float
    num_samples: int
    latest: dict[int, float] = field(default_factory=dict)  # when a sample last got tokens


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None):
        self.registry = registry if registry is not None else CollectorRegistry()
        common = {"model_name": model_name, "engine": "0"}
        self._events = Events(common)
        self._engine: Engine | None = None
        self._num_queued: Callable[[], int] = lambda: 0
        self._before: Values = {}  # counters of engines that are gone
        self._recent = RecentAcceptance()
        self._tracks: dict[str, _Track] = {}
        self._state: Health = "starting"
        self._prompt_tokens = 0  # before the latest step
        self._render_lock = threading.Lock()
        (finished,) = METRICS["request_success"].labels
        for reason in finished.values:
            self._events.counter("request_success", finished_reason=reason)
        histogram = self._events.histogram
        self._first_token = histogram("time_to_first_token_seconds")
        self._between = histogram("inter_token_latency_seconds")
        self._step_seconds = histogram("step_duration_seconds")
        self._tokens_per_step = histogram("iteration_tokens_total")
        self.registry.register(Exposition(common, self._events, self._read))
        ProcessCollector(registry=self.registry)

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
        self._events.histogram("request_params_n").observe(n)
        if max_tokens is not None:
            self._events.histogram("request_params_max_tokens").observe(max_tokens)

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
            self._events.counter("request_success", finished_reason=reason).inc()
        whole = [o for o in result.outputs if o.finish_reason in ("stop", "length")]
        if track is None or not whole:
            return
        longest = max(len(output.token_ids) for output in whole)
        self._events.histogram("request_max_num_generation_tokens").observe(longest)
        for output in whole:
            self._observe_sample(track, len(result.prompt_token_ids), output)

    def _observe_sample(self, track: _Track, num_prompt: int, output: Completion) -> None:
        stats, histogram = output.stats, self._events.histogram
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
            ended = self._events.counter("request_success", finished_reason="error")
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
        self._events.counter("http_requests", status=f"{status // 100}xx", **route).inc()
        self._events.counter("http_responses", code=str(status), **route).inc()
        self._events.histogram("http_request_duration_seconds", **route).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Body and content type of GET /metrics."""
        with self._render_lock:  # two scrapers must not see the counters in turns
            return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _read(self) -> Values:
        values: Values = {
            ("server_state", (state,)): float(state == self._state) for state in get_args(Health)
        }
        values["build_info", (headstart.__version__,)] = 1
        engine = self._engine
        if engine is None:
            return values
        values |= _sum(self._before, counters(engine)) | gauges(engine, self._num_queued())
        return values | (self._recent.values(engine) if engine.speculation is not None else {})


def _sum(first: Values, second: Values) -> Values:
    return {series: first.get(series, 0) + second.get(series, 0) for series in {**first, **second}}
