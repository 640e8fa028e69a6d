"""Request bodies: read within limits, parsed beside the event loop where they are large.

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
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from headstart.server.protocol.base import HARMLESS, Part, field_names
from headstart.server.protocol.field_errors import field_refusal
from headstart.server.refusals import Refusal, unavailable

Body = TypeVar("Body", bound=Part)

_JSON = "application/json"
_PARTS = ("headstart", "stream_options")  # objects, in which null is no value either
_AT_ONCE = 32  # bodies of the largest size that may be in memory together
_MOST_TIMES = 8  # the largest size that the values of one body may take
_OBJECT_BYTES, _LIST_BYTES, _VALUE_BYTES = 190, 64, 40  # what they take, small ones
_ARRIVAL_SECONDS = 60.0  # a body must arrive within this time
_SMALL_BYTES = 1 << 14  # parsed on the loop: quicker than a change of threads
LARGE_BYTES = 1 << 20
_PATIENCE = 10.0  # seconds after a large request, where there is always another one


class BodyReader:
    def __init__(self, max_bytes: int, in_thread: Callable[..., Any]):
        self._max_bytes, self._in_thread = max_bytes, in_thread
        self._num_held = 0
        self._lock = threading.RLock()  # a body may end in any thread
        self.large = LargeRequests()

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body as `kind`, or a Refusal."""
        # A page may send a body of no type without being asked first; other clients forget it.
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
                body = await self._in_thread(parse, data, kind)
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
    """Only JSON, and nothing that a page of another origin may send without being asked first."""
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
    fields = _meaningful(document)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise field_refusal(error, fields, field_names(kind)) from None


def _meaningful(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that mean something: not null, and not among the harmless ones."""
    return {
        name: _without_nulls(value) if name in _PARTS else value
        for name, value in body.items()
        if name not in HARMLESS and value is not None
    }


def _without_nulls(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if value is not None}


class LargeRequests:
    """Knows whether there were any since memory was last given back."""

    def __init__(self) -> None:
        self._latest: float | None = None

    def note(self, num_bytes: int) -> None:
        if num_bytes >= LARGE_BYTES:
            self._latest = time.monotonic()

    def are_over(self, *, is_idle: bool) -> bool:
        """Whether it is time to give memory back; then it is not for a while."""
        latest = self._latest
        if latest is None or not (is_idle or time.monotonic() - latest > _PATIENCE):
            return False
        self._latest = None
        return True


def give_back() -> None:
    """glibc keeps what was freed between blocks in use; elsewhere there is nothing to do."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
