"""The server's log: one line a record, as text for people or JSON for machines, on stderr.

uvicorn's and other libraries' records take the same form. Every answered request gives one line;
prompts are in it only where that was asked for. What clients send cannot break a line.

    configure("json")                   once, before the first record; uvicorn is then given
                                        log_config=None and access_log=False
    log_request(RequestRecord(...))     when an answer has ended, refusals included
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from headstart.engine.output import Result
    from headstart.engine.request import RequestStats

LogFormat = Literal["text", "json"]
_FIELDS = "headstart_fields"  # attribute of a record that holds its fields
_log = logging.getLogger("headstart.server.requests")


@dataclass(kw_only=True)
class RequestRecord:
    """What the line of one request says; times are in seconds."""

    id: str
    route: str
    status: int
    model: str
    client: str | None
    seconds: float  # from arrival to the last byte
    first_token_seconds: float | None = None  # from arrival; None where there was none
    results: Sequence[Result] = field(default_factory=tuple)  # one per prompt
    is_stream: bool = False
    error: str | None = None  # what a refused or failed request was told
    prompt: Any = None  # set it only with --log-prompts

    def as_fields(self) -> dict[str, Any]:
        """In the order of the line; what is unknown is left out."""
        fields: dict[str, Any] = {
            "id": self.id, "route": self.route, "status": self.status, "model": self.model,
            "client": self.client, "stream": self.is_stream, "seconds": round(self.seconds, 6),
        }  # fmt: skip
        if self.first_token_seconds is not None:
            fields["first_token_seconds"] = round(self.first_token_seconds, 6)
        if self.results:
            fields |= _of_results(self.results, self.seconds, self.first_token_seconds)
        fields |= {"error": self.error, "prompt": self.prompt}
        return {name: value for name, value in fields.items() if value is not None}


def _of_results(
    results: Sequence[Result], seconds: float, first_token_seconds: float | None
) -> dict[str, Any]:
    outputs = [output for result in results for output in result.outputs]
    num_output = sum(len(output.token_ids) for output in outputs)
    drafted = sum(sum(output.stats.acceptance.drafted) for output in outputs)
    accepted = sum(sum(output.stats.acceptance.accepted) for output in outputs)
    rounds = sum(output.stats.acceptance.rounds for output in outputs)
    fields: dict[str, Any] = {
        "prompt_tokens": sum(len(result.prompt_token_ids) for result in results),
        "cached_tokens": sum(
            min(result.stats.num_cached_tokens, len(result.prompt_token_ids)) for result in results
        ),
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
    """Until the engine began; what it did not see, from arrival to submission, is waiting, too."""
    queued = [own.queue_seconds for own in stats if own.queue_seconds is not None]
    if not queued:
        return None
    seen = [own.first_token_seconds for own in stats if own.first_token_seconds is not None]
    unseen = first_token - min(seen) if first_token is not None and seen else 0.0
    return round(max(queued) + max(unseen, 0.0), 6)


def log_request(record: RequestRecord) -> None:
    """Write the line of one request; what went wrong on our side is a warning."""
    level = logging.WARNING if record.status >= 500 or record.error else logging.INFO
    _log.log(level, "request", extra={_FIELDS: record.as_fields()})


class TextFormatter(logging.Formatter):
    """`2026-11-15 09:20:53.123 INFO    headstart.server  message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        words = [record.getMessage()]
        words += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        line = f"{_time(record)} {record.levelname:<7} {record.name}  {_one_line(' '.join(words))}"
        return "\n".join([line, *_traceback(record)])


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
