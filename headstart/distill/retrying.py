"""HTTP requests to a server that may be busy, restarting, or far away."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from headstart.errors import ServerError

if TYPE_CHECKING:
    import httpx

_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 60.0
_MOST_BYTES = 1 << 26  # far more than the longest answer with its token ids
_KEPT = ("retry-after", "content-type")  # headers of an answer that are looked at
_TRANSIENT = (408, 409, 425, 429)
_REMEDIES = {
    401: "Give --api-key, or set HEADSTART_API_KEY.",
    403: "Give --api-key, or set HEADSTART_API_KEY.",
    404: "Check the URL of --server and the name of --server-model.",
}


class Refused(Exception):
    """The server understood the request and will not do it: no use in asking again."""

    def __init__(self, status: int, words: str):
        super().__init__(f"{status}: {words}")
        self.status, self.words = status, words


class RetryingClient:
    """One server; a request is tried again, ever later, while there is hope."""

    def __init__(self, client: httpx.AsyncClient, retries: int, *, seconds: float = 600.0):
        """seconds: longest time for one try, from the request to the last byte of the answer."""
        self._client, self._retries, self._seconds = client, retries, seconds

    async def get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        import httpx

        failure = ""
        for attempt in range(self._retries + 1):
            asked_for = None
            try:
                response = await self._answer(method, path, body)
            except httpx.TransportError as error:  # refused, dropped, timed out
                failure = f"{type(error).__name__} {error}".strip()
            except TimeoutError:
                failure = f"no whole answer in {self._seconds:g} s"
            else:
                if response.is_success:
                    document = _document(response)
                    if document is not None:
                        return document
                    failure = f"an answer that is not a JSON object ({response.text[:80]!r})"
                else:
                    failure = f"status {response.status_code} ({_words(response)})"
                    if response.status_code < 500 and response.status_code not in _TRANSIENT:
                        self._give_up(response)
                    asked_for = _retry_after(response.headers.get("retry-after"))
            if attempt < self._retries:
                await asyncio.sleep(pause(attempt) if asked_for is None else asked_for)
        raise ServerError(
            f"{self._client.base_url} failed {self._retries + 1} times, last with {failure}. "
            "Answers received so far are kept: run the same command again when the server is well."
        )

    async def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """One try, bounded in time and size: httpx bounds the time between two bytes alone."""
        import httpx

        data = bytearray()
        async with (
            asyncio.timeout(self._seconds),
            self._client.stream(method, path, json=body) as response,
        ):
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _MOST_BYTES:
                    raise ServerError(
                        f"{response.request.url} sends an answer of more than {_MOST_BYTES:,} "
                        "bytes; expected a chat completion. Check the URL of --server."
                    )
        kept = {name: response.headers[name] for name in _KEPT if name in response.headers}
        return httpx.Response(
            response.status_code, headers=kept, content=bytes(data), request=response.request
        )

    def _give_up(self, response: httpx.Response) -> None:
        remedy = _REMEDIES.get(response.status_code)
        if remedy is not None:
            raise ServerError(
                f"{response.request.url} answers {response.status_code} ({_words(response)}). "
                f"{remedy}"
            )
        raise Refused(response.status_code, _words(response))


def pause(attempt: int) -> float:
    """Seconds before the next try: doubled each time, and apart from what others wait."""
    return min(_FIRST_SECONDS * 2.0**attempt, _LONGEST_SECONDS) * random.uniform(0.5, 1.5)


def _retry_after(value: str | None) -> float | None:
    """What the server asks for, in seconds or as a date; nonsense counts as nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), 10 * _LONGEST_SECONDS)


def _document(response: httpx.Response) -> dict[str, Any] | None:
    try:
        document = response.json()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _words(response: httpx.Response) -> str:
    """The server's own message, on one line of bounded length."""
    document = _document(response) or {}
    error = document.get("error", document.get("message", response.text))
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:300]
