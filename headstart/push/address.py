"""Where a server is, what it is asked, and what it says of a head that it took."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from headstart.errors import ConfigError, ServerError

_MOST_BYTES = 1 << 20  # of an answer
Report = Callable[[int], None]  # told how many bytes were just sent


@dataclass(frozen=True)
class Pushed:
    """What a server says of the head that it took."""

    server: str  # its kind
    head_version: int
    digest: str
    num_bytes: int


@dataclass(frozen=True)
class Address:
    """Where a server is, and how long it is waited for."""

    url: str
    seconds: float = 600.0
    folder: str | None = None  # one that the server's machine has, too, for kinds that need it

    def ask(
        self, method: str, path: str, body: Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:  # fmt: skip
        """Status and JSON object of an answer; ServerError where none comes."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--server is {self.url!r}; give a URL as http://127.0.0.1:8000.")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.seconds)
        base = parts.path.rstrip("/").removesuffix("/v1")
        try:
            try:
                connection.request(method, base + path, body, headers or {})
            except ConnectionError:
                if body is None:
                    raise
                # It may have refused the rest of the body; then the answer is there already.
            return _answer(connection.getresponse())
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerError(
                f"{self.url} cannot be asked ({why}). Check the URL of --server, and that the "
                "server runs."
            ) from error
        finally:
            connection.close()


def _answer(response: HTTPResponse) -> tuple[int, dict[str, Any]]:
    data = response.read(_MOST_BYTES)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = {}
    return response.status, document if isinstance(document, dict) else {}
