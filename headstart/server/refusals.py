"""Errors as OpenAI's clients expect them: a status code and one JSON object.

Every refusal says what was found, what is expected and what to do. What went wrong inside is
logged; clients learn that it did, not where.

An error names the field of the request that it is about. Where it is raised that is not always
known, and the engine has other names for some fields: callers add what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headstart.errors import ConfigError, MissingExtra, PromptTooLong, RequestError

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip

STOPPED = "stopped"  # the code of answers that the end of the server cut off
TIMED_OUT = "request_timeout"
ANTHROPIC_PATH = "/v1/messages"
_ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_WITH_VERSION = ("chat", "completions", "responses", "messages", "models")  # below /v1
_NOT_HERE = {
    "embeddings": "embeddings", "embed": "embeddings", "pooling": "embeddings",
    "rerank": "rankings", "score": "scores of pairs", "classify": "classes",
    "audio": "speech", "images": "images", "moderations": "moderation", "files": "files",
    "batches": "batches", "fine_tuning": "fine-tuning", "assistants": "assistants",
    "threads": "threads", "realtime": "speech", "conversations": "kept conversations",
    "api": "Ollama's API", "completion": "other engines' own APIs", "infill": "filling in",
}  # fmt: skip


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None  # its `type`, where the status alone does not say it

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        kind = self.kind or _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same in the shape of /v1/messages."""
        own = self.body["error"]
        kind = {"server_error": "api_error"}.get(own["type"], own["type"])
        return {"type": "error", "error": {"type": kind, "message": own["message"]}}

    def body_for(self, path: str) -> dict[str, Any]:
        return self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body


def refusal_of(error: BaseException) -> Refusal:
    """The answer to a request that ended with this error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, PromptTooLong):
        return too_long(str(error), error.field)
    if isinstance(error, RequestError | ConfigError):  # options of a request are its own
        return Refusal(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, MissingExtra):
        return Refusal(501, str(error), code="missing_extra")
    return engine_failed()


def engine_failed() -> Refusal:
    return Refusal(
        500, "the engine failed while answering this request; the server's log says more.",
        code="engine_error",
    )  # fmt: skip


def too_long(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, message, param=param, code="context_length_exceeded")


def unanswerable(message: str, param: str | None = None) -> Refusal:
    """A request that its own grammar, or its own choice of tokens, ended in the engine."""
    return Refusal(400, message, param=param, code="unanswerable")


def queue_full(open_now: int, retry_seconds: int) -> Refusal:
    return Refusal(
        429, f"{open_now} answers are running or waiting and no more may wait. Try again later.",
        code="rate_limit_exceeded", headers={"Retry-After": str(retry_seconds)},
    )  # fmt: skip


def unavailable(why: str, *, code: str, retry_seconds: int = 5) -> Refusal:
    return Refusal(503, why, code=code, headers={"Retry-After": str(retry_seconds)})


def stopped() -> Refusal:
    return unavailable("the server was stopped before the answer was complete.", code=STOPPED)


def too_slow(seconds: float) -> Refusal:
    """A status that clients do not try again by themselves: it would take as long again."""
    return Refusal(
        400, f"no token was written within {seconds:g} s, this server's limit. Send a shorter "
        "prompt or ask when fewer requests run; --request-timeout-seconds raises the limit.",
        code=TIMED_OUT, kind="timeout_error", headers={"x-should-retry": "false"},
    )  # fmt: skip


def no_such_route(status: int, message: str, headers: Mapping[str, str]) -> Refusal:
    """What the router says before any of our code runs."""
    code = {404: "unknown_url", 405: "method_not_supported"}.get(status)
    return Refusal(status, message, code=code, headers=headers)


def where_instead(path: str) -> str:
    """What to ask instead of a path that there is no route for."""
    parts = path.strip("/").split("/")
    if parts[:2] == ["v1", "v1"]:
        return " The client adds /v1 itself; leave it out of the base URL."
    if parts[:2] == ["v1", "responses"]:
        return " This server keeps no answers; send the whole conversation to POST /v1/responses."
    if parts[0] in _WITH_VERSION:
        return f" /v1/{'/'.join(parts)[:60]} is; the base URL of most clients ends with /v1."
    near = get_close_matches(path.rstrip("/")[:80], _ANSWERS, 1, cutoff=0.85)
    if near:
        return f" Did you mean {near[0]}?"
    names = set(parts[:3])
    found = next((what for name, what in _NOT_HERE.items() if name in names), None)
    if found is None:
        return " GET /docs lists what there is."
    return (
        f" This server answers text with text: {', '.join(_ANSWERS[:-1])} and {_ANSWERS[-1]}. "
        f"For {found} ask another one."
    )


@contextmanager
def about(field: str | None) -> Iterator[None]:
    """What fails inside is about this field, unless it names one itself."""
    try:
        yield
    except (RequestError, ConfigError) as error:
        error.field = error.field or field
        raise


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The same error about the field that the request has: `{"prompt": "messages"}`."""
    if isinstance(error, RequestError | ConfigError) and error.field is not None:
        error.field = names.get(error.field, error.field)
    return error
