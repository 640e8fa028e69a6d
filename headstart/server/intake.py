"""What a server takes in: bodies within limits, and answers up to a number of places.

Sizes are checked while bytes arrive and before anything is parsed. All bodies in memory together
are bounded, too: many clients that each stay below their own limit are still many. A body counts
until the request that was made of it is gone, with the memory that its values take: `[],` is three
bytes to send and over fifty to keep. Memory that large bodies took goes back to the system, and not
only to the allocator.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from math import ceil
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from headstart.errors import RequestError
from headstart.server.protocol.base import STRUCTURED, Part, field_names, means_nothing
from headstart.server.protocol.field_errors import field_refusal
from headstart.server.refusals import Refusal, queue_full, unavailable
from headstart.server.worker import Worker

Body = TypeVar("Body", bound=Part)

_JSON = "application/json"
_PARTS = ("headstart", "stream_options")  # objects, in which null is no value either
_AT_ONCE = 32  # bodies of the largest size that may be in memory together
_MOST_TIMES = 8  # the largest size that the values of one body may take
_OBJECT_BYTES, _LIST_BYTES, _VALUE_BYTES = 190, 64, 40  # what they take, small ones
_ARRIVAL_SECONDS = 60.0  # a body must arrive within this time
_SMALL_BYTES = 1 << 14  # parsed on the loop: quicker than a change of threads
_LARGE_BYTES = 1 << 20
_TRIM_SECONDS = 10.0  # after a large request, on a server that is never idle
_SMOOTHING = 0.1  # of a new duration in the mean that Retry-After is made from
_LONGEST_RETRY = 60
ANY_NAME = "default"  # of the model, always accepted


class BodyReader:
    """Reads bodies, large ones in a thread of `pool`, so that the event loop goes on meanwhile."""

    def __init__(self, max_bytes: int, pool: Executor):
        self._max_bytes, self._pool = max_bytes, pool
        self._num_held = 0
        self._lock = threading.RLock()  # a body may end in any thread
        self.large = LargeRequests()

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body as `kind`, or a Refusal."""
        # For a page, browsers send a body without a type unchecked; other clients may leave it out.
        unnamed = "" if "origin" in request.headers else _JSON
        _check_type(request.headers.get("content-type", unnamed))
        try:
            async with asyncio.timeout(_ARRIVAL_SECONDS):
                data = await self._bytes(request)
        except TimeoutError:
            raise Refusal(
                408, f"the body did not arrive within {_ARRIVAL_SECONDS:g} s.", code="body_timeout"
            ) from None
        except ClientDisconnect:
            raise Refusal(400, "the client went away while sending.", code="client_gone") from None
        self.large.note(len(data))
        weight = _weight(data)
        try:
            self._check_weight(weight - len(data), weight)
            self._hold(weight - len(data))
        except BaseException:
            self._hold(-len(data))
            raise
        try:
            if len(data) <= _SMALL_BYTES:
                body = parse(data, kind)
            else:
                loop = asyncio.get_running_loop()
                body = await loop.run_in_executor(self._pool, parse, data, kind)
        except BaseException:
            self._hold(-weight)
            raise
        weakref.finalize(body, self._hold, -weight)
        return body

    def _check_weight(self, more: int, weight: int) -> None:
        if weight > _MOST_TIMES * self._max_bytes:
            raise Refusal(
                413, "the body holds too many small values to be kept in memory. Send fewer lists, "
                "objects and numbers.", code="body_too_large",
            )  # fmt: skip
        if self._num_held + more > _AT_ONCE * self._max_bytes:
            raise unavailable("too many large requests at once.", code="too_much_at_once")

    def _hold(self, num_bytes: int) -> None:
        with self._lock:
            self._num_held += num_bytes

    async def _bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and len(declared) < 20 and int(declared) > self._max_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        own = 0
        try:
            async for chunk in request.stream():
                own += len(chunk)
                self._hold(len(chunk))
                if own > self._max_bytes:
                    raise self._too_large()
                if self._num_held > _AT_ONCE * self._max_bytes:
                    raise unavailable("too many large requests at once.", code="too_much_at_once")
                chunks.append(chunk)
        except BaseException:
            self._hold(-own)
            raise
        return b"".join(chunks)

    def _too_large(self) -> Refusal:
        return Refusal(
            413, f"the body is larger than {self._max_bytes:,} bytes, this server's limit "
            "(--max-body-bytes).", code="body_too_large",
        )  # fmt: skip


def _weight(data: bytes) -> int:
    """About the memory that a body's values take; signs inside of texts count as well."""
    lists = _OBJECT_BYTES * data.count(b"{") + _LIST_BYTES * data.count(b"[")
    return len(data) + lists + _VALUE_BYTES * data.count(b",")


def _check_type(given: str) -> None:
    """Only JSON: for a page of another origin browsers send that after a CORS preflight only."""
    if given.partition(";")[0].strip().lower() != _JSON:
        raise Refusal(
            415, f"the content type is {given[:80]!r}; send {_JSON}.", code="bad_content_type"
        )


def parse(data: bytes, kind: type[Body]) -> Body:
    """JSON bytes as `kind`; a Refusal says which field is wrong, and how."""
    try:
        document = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        found = type(document).__name__
        raise Refusal(400, f"the body is a {found}; give a JSON object.", code="invalid_json")
    fields = _structured(_meaningful(document, kind), kind)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise field_refusal(error, fields, field_names(kind)) from None


def _meaningful(body: dict[str, Any], kind: type[Part]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if name in _PARTS else value
        for name, value in body.items()
        if not means_nothing(kind, name, value)
    }


def _structured(fields: dict[str, Any], kind: type[Part]) -> dict[str, Any]:
    """The same with other servers' names for `structured_outputs` under that one."""
    found = [name for name in fields if name in STRUCTURED and name not in kind.model_fields]
    if not found or "structured_outputs" not in kind.model_fields:
        return fields
    if len(found) > 1 or "structured_outputs" in fields:
        both = [*found, "structured_outputs"][:2]
        raise Refusal(
            400, f"{both[0]} and {both[1]} are both given; give one.", param=found[0],
            code="invalid_value",
        )  # fmt: skip
    own = {STRUCTURED[found[0]]: fields[found[0]]}
    kept = {name: value for name, value in fields.items() if name != found[0]}
    return {**kept, "structured_outputs": own}


def _without_nulls(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if value is not None}


class LargeRequests:
    """When the last one came, if memory was not given back since."""

    def __init__(self) -> None:
        self._latest: float | None = None

    def note(self, num_bytes: int) -> None:
        if num_bytes >= _LARGE_BYTES:
            self._latest = time.monotonic()

    def are_over(self, *, is_idle: bool) -> bool:
        """Whether memory should be given back now; True once for the requests up to now."""
        latest = self._latest
        if latest is None or not (is_idle or time.monotonic() - latest > _TRIM_SECONDS):
            return False
        self._latest = None
        return True


def give_back() -> None:
    """glibc keeps what was freed between blocks in use; elsewhere there is nothing to do."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Gate:
    """Places for answers, counted on the event loop from the moment a request is understood.

    Neither a burst nor slow prompts can build a queue that is not counted.
    """

    def __init__(self, worker: Worker, *, max_queue: int):
        self._worker, self._max_queue = worker, max_queue
        self._mean_seconds = 1.0
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_open = 0  # answers
        self.is_open = False  # when the first request is as fast as any other
        self.is_draining = False

    def check(self) -> None:
        """Raise unless a new request can be answered at all."""
        if self._worker.failure is not None:
            raise unavailable("the engine has failed and the server ends.", code="engine_dead")
        if self.is_draining:
            raise unavailable("the server is shutting down; ask another one.", code="draining")
        if not (self._worker.is_ready and self.is_open):
            raise unavailable("the model is being loaded; try again soon.", code="loading")

    @contextmanager
    def entry(
        self, num_answers: int, *, is_timed: bool = True, field: str | None = None
    ) -> Iterator[None]:
        """Hold places for a request, or refuse it; Retry-After is made of those that are timed.

        `field` is the one that asks for so many answers.
        """
        assert num_answers > 0, num_answers
        self.check()
        engine = self._worker.engine
        assert engine is not None
        running = engine.options.max_running_requests
        assert running is not None  # decided when the engine started
        places = running + self._max_queue
        if num_answers > places:
            raise RequestError(
                f"the request wants {num_answers} answers and this server has {places} places. "
                "Ask for fewer.",
                field=field,
            )
        if self.num_open + num_answers > places:
            wait = self._mean_seconds * self.num_open / running
            raise queue_full(self.num_open, min(max(1, ceil(wait)), _LONGEST_RETRY))
        self.num_open += num_answers
        self._empty.clear()
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            yield
        finally:
            self.num_open -= num_answers
            if not self.num_open:
                self._empty.set()
            if is_timed:
                self._mean_seconds += _SMOOTHING * (clock() - started - self._mean_seconds)

    async def wait_empty(self) -> None:
        await self._empty.wait()


def check_name(name: str | None, known: Sequence[str]) -> None:
    """Refusal for a name that is not one of the model's."""
    if name is not None and name != ANY_NAME and name not in known:
        raise Refusal(
            404, f"no model is called {name[:80]!r}; this server has {', '.join(known)} (also as "
            f"{ANY_NAME}).", param="model", code="model_not_found",
        )  # fmt: skip
