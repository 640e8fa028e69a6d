"""What is recorded of requests: numbers for Prometheus, and one log line each, text or JSON.

uvicorn's and other libraries' log records take the same form. Prompts are in a line only where that
was asked for. What clients send cannot break a line, nor make a new series of a metric.

    configure("json")                   once, before the first log record; uvicorn is then given
                                        log_config=None and access_log=False
    log_request(RequestRecord(...))     when an answer has ended, refusals included
    ServerMetrics(Series("my-model"))   one per server; its methods may be called in any thread
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from headstart.server.metrics.table import METRICS, OTHER, Metric

if TYPE_CHECKING:  # the log is set up before anything large is imported
    from headstart.engine.output import Completion, Result
    from headstart.engine.stats import RequestStats
    from headstart.server.metrics.series import Series

LogFormat = Literal["text", "json"]
_FIELDS = "headstart_fields"  # attribute of a log record that holds its fields
_log = logging.getLogger("headstart.server.requests")


@dataclass(kw_only=True)
class RequestRecord:
    """What is known of a request, noted while it is answered; times are in seconds."""

    arrived: float = field(default_factory=time.perf_counter)
    id: str = "-"
    request_id: str | None = None  # the client's own
    route: str = ""
    status: int = 0
    model: str = ""
    client: str | None = None
    seconds: float = 0.0  # from arrival to the last byte
    first_token_seconds: float | None = None  # from arrival; None where there was none
    results: Sequence[Result] = ()  # one per prompt that has ended
    prompt_tokens: int | None = None  # of all prompts, also of those that have not ended,
    output_tokens: int = 0  # and of what was written for them
    is_stream: bool = False
    error: str | None = None  # the message of a refused or failed request
    prompt: Any = None  # set it only with --log-prompts

    def as_fields(self) -> dict[str, Any]:
        """Fields in the order of the line; what is unknown is left out."""
        fields: dict[str, Any] = {
            "id": self.id, "request_id": self.request_id, "route": self.route,
            "status": self.status, "model": self.model, "client": self.client,
            "stream": self.is_stream, "seconds": round(self.seconds, 6),
        }  # fmt: skip
        if self.first_token_seconds is not None:
            fields["first_token_seconds"] = round(self.first_token_seconds, 6)
        if self.results:
            fields |= _of_results(self.results, self.seconds, self.first_token_seconds)
        if self.prompt_tokens is not None:
            fields |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        fields |= {"error": self.error, "prompt": self.prompt}
        return {name: value for name, value in fields.items() if value is not None}


def _of_results(
    results: Sequence[Result], seconds: float, first_token_seconds: float | None
) -> dict[str, Any]:
    outputs = [output for result in results for output in result.outputs]
    num_output = sum(len(output.token_ids) for output in outputs)
    drafted = sum(output.stats.num_drafted for output in outputs)
    accepted = sum(output.stats.num_accepted for output in outputs)
    rounds = sum(output.stats.rounds.total() for output in outputs)
    fields: dict[str, Any] = {
        "prompt_tokens": sum(len(result.prompt_token_ids) for result in results),
        "cached_tokens": sum(result.num_cached_tokens for result in results),
        "output_tokens": num_output,
        "finish_reason": ",".join(sorted({str(output.finish_reason) for output in outputs})),
        "queue_seconds": _queue_seconds([o.stats for o in outputs], first_token_seconds),
        "preemptions": sum(output.stats.num_preemptions for output in outputs),
    }
    decoding = seconds - (first_token_seconds or 0.0)
    if num_output > len(outputs) and decoding > 0:
        fields["tokens_per_second"] = round((num_output - len(outputs)) / decoding, 2)
    if rounds:
        fields["drafts_per_round"] = round(drafted / rounds, 2)
        fields["acceptance_length"] = round(1 + accepted / rounds, 3)
    if drafted:
        fields["acceptance_rate"] = round(accepted / drafted, 4)
    return fields


def _queue_seconds(stats: Sequence[RequestStats], first_token: float | None) -> float | None:
    """Seconds until the engine began; the time from arrival to submission is waiting, too."""
    queued = [own.queue_seconds for own in stats if own.queue_seconds is not None]
    if not queued:
        return None
    seen = [own.first_token_seconds for own in stats if own.first_token_seconds is not None]
    unseen = first_token - min(seen) if first_token is not None and seen else 0.0
    return round(max(queued) + max(unseen, 0.0), 6)


def log_request(record: RequestRecord) -> None:
    """Write the line of one request; what went wrong on our side is a warning.

    That is a status of 500 and more, and an answer that broke off after it had begun.
    """
    is_ours = record.status >= 500 or (record.status < 400 and record.error is not None)
    level = logging.WARNING if is_ours else logging.INFO
    _log.log(level, "request", extra={_FIELDS: record.as_fields()})


@dataclass
class _Track:
    """When things happened to a request that is on its way."""

    arrived: float
    num_samples: int
    latest: dict[int, float] = field(default_factory=dict)  # when a sample last got tokens


class ServerMetrics:
    """What one server counts as it happens; what its engine counts is read at each scrape."""

    def __init__(self, series: Series):
        self._series, self._plain = series, series.plain
        self._tracks: dict[str, _Track] = {}

    def request_started(
        self, request_id: str, *, arrived: float | None = None, n: int = 1,
        max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """A request goes to the engine; `arrived` is when its first byte was read."""
        self._tracks[request_id] = _Track(time.perf_counter() if arrived is None else arrived, n)
        self._plain["request_params_n"].observe(n)
        if max_tokens is not None:
            self._plain["request_params_max_tokens"].observe(max_tokens)

    def tokens(self, request_id: str, sample: int, count: int) -> None:
        """An update brought `count` tokens of one sample; unknown requests are ignored."""
        track = self._tracks.get(request_id)
        if track is None or not count:
            return
        now, before = time.perf_counter(), track.latest.get(sample)
        track.latest[sample] = now
        if before is None:
            self._plain["time_to_first_token_seconds"].observe(now - track.arrived)
        else:
            self._plain["inter_token_latency_seconds"].observe(now - before)

    def request_finished(self, result: Result) -> None:
        """All samples of a request have ended, whatever the reason."""
        track = self._tracks.pop(result.request_id, None)
        for output in result.outputs:
            self._count("request_success", {"finished_reason": output.finish_reason or "error"})
        whole = [o for o in result.outputs if o.finish_reason in ("stop", "length")]
        if track is None or not whole:
            return
        longest = max(len(output.token_ids) for output in whole)
        self._plain["request_max_num_generation_tokens"].observe(longest)
        for output in whole:
            self._observe_sample(track, len(result.prompt_token_ids), output)

    def _observe_sample(self, track: _Track, num_prompt: int, output: Completion) -> None:
        stats, plain = output.stats, self._plain
        cached = min(stats.num_cached_tokens, num_prompt)
        plain["request_prompt_tokens"].observe(num_prompt)
        plain["request_prefill_kv_computed_tokens"].observe(num_prompt - cached)
        plain["request_generation_tokens"].observe(len(output.token_ids))
        whole = track.latest.get(output.index, time.perf_counter()) - track.arrived
        plain["e2e_request_latency_seconds"].observe(whole)
        if stats.total_seconds is None or stats.first_token_seconds is None:
            return
        queued, first = stats.queue_seconds or 0.0, stats.first_token_seconds
        running, decoding = stats.total_seconds - queued, stats.total_seconds - first
        # The time from arrival to submission, which the engine does not count, is waiting as well.
        plain["request_queue_time_seconds"].observe(max(0.0, whole - running))
        plain["request_prefill_time_seconds"].observe(first - queued)
        plain["request_decode_time_seconds"].observe(decoding)
        plain["request_inference_time_seconds"].observe(running)
        if len(output.token_ids) > 1:
            each = decoding / (len(output.token_ids) - 1)
            plain["request_time_per_output_token_seconds"].observe(each)

    def request_failed(self, request_id: str) -> None:
        """A request ended with an error and without a result."""
        track = self._tracks.pop(request_id, None)
        if track is not None:
            self._count("request_success", {"finished_reason": "error"}, track.num_samples)

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        """A step of the engine took so long and handled so many tokens of prompts and answers."""
        self._plain["step_duration_seconds"].observe(seconds)
        self._plain["iteration_tokens_total"].observe(num_tokens)

    def http_request(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        """One answer; `handler` is the route's template, None where no route matched."""
        # Paths that clients make up must not become series; `bounded` does that for methods.
        route = {"handler": handler or "none", "method": method if handler else "none"}
        self._count("http_requests", {**route, "status": f"{status // 100}xx"})
        self._count("http_responses", {**route, "code": str(status)})
        taken = self._series.histograms["http_request_duration_seconds"]
        labels = bounded(METRICS["http_request_duration_seconds"], route)
        taken.labels(**self._series.common, **labels).observe(seconds)

    def _count(self, name: str, labels: Mapping[str, str], amount: int = 1) -> None:
        own = bounded(METRICS[name], labels)
        self._series.counters[name].labels(**self._series.common, **own).inc(amount)


def bounded(metric: Metric, given: Mapping[str, str]) -> dict[str, str]:
    """The values of a metric's labels by name: each as given if the table lists it, else OTHER."""
    found = {}
    for label in metric.labels:
        value = given[label.name]
        found[label.name] = value if not label.values or value in label.values else OTHER
    return found


class TextFormatter(logging.Formatter):
    """`2026-11-15 09:20:53.123 INFO    headstart.server  message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        words = [record.getMessage()]
        words += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        line = f"{_time(record)} {record.levelname:<7} {record.name}  {_one_line(' '.join(words))}"
        return "\n".join([line, *map(_one_line, _traceback(record))])


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record).replace(" ", "T") + "Z", "level": record.levelname.lower(),
            "logger": record.name, "message": record.getMessage(), **_fields(record),
        }  # fmt: skip
        if lines := _traceback(record):
            line["exception"] = "\n".join(lines)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure(log_format: LogFormat, *, stream: TextIO | None = None) -> None:
    """Send all records of the process through one formatter, to stderr."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.set_name("headstart")
    root = logging.getLogger()
    for old in [own for own in root.handlers if own.get_name() == "headstart"]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("headstart").setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.INFO if name != "uvicorn.access" else logging.WARNING)
    logging.captureWarnings(True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    return fields


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}"


def _traceback(record: logging.LogRecord) -> list[str]:
    if record.exc_info is None or record.exc_info[1] is None:
        return []
    return "".join(traceback.format_exception(record.exc_info[1])).splitlines()


def _shown(value: Any) -> str:
    """A word; what has blanks or quotes in it is written as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_word = isinstance(value, str) and value and not set(value) & set(' "=')
    return text if is_word or not isinstance(value, str) else json.dumps(value)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
