"""Servers that take a head while they run: which kind one is, and how each kind is given it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import urlsplit

from headstart.errors import ConfigError, ServerError
from headstart.heads.head import Head
from headstart.push.sent_head import CONTENT_TYPE, SentHead, digest_of

PATH = "/push_head"
_STATES = ("starting", "ready", "draining", "dead")  # what /health of our server says
_MOST_BYTES = 1 << 20  # of an answer
Report = Callable[[int], None]  # told how many bytes were just sent


@dataclass(frozen=True)
class Pushed:
    """What a server says of the head that it took."""

    server: str  # its kind
    head_version: int
    digest: str
    num_bytes: int


class Kind(Protocol):
    """One kind of server."""

    name: str

    def recognises(self, server: Address) -> bool: ...

    def push(self, server: Address, head: Head, key: str | None, report: Report) -> Pushed: ...


@dataclass(frozen=True)
class Address:
    """Where a server is, and how long it is waited for."""

    url: str
    seconds: float = 600.0

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
            raise ServerError(
                f"{self.url} cannot be asked ({str(error) or type(error).__name__}). Check the URL "
                "of --server, and that the server runs."
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


class OwnServer:
    """`headstart serve --allow-push`."""

    name = "headstart"

    def recognises(self, server: Address) -> bool:
        return server.ask("GET", "/health")[1].get("status") in _STATES

    def push(self, server: Address, head: Head, key: str | None, report: Report) -> Pushed:
        if key is None:
            raise ConfigError(
                "a server takes a head only with its push key; give --key-file, or set "
                "HEADSTART_PUSH_KEY."
            )
        sent, state = SentHead.of(head), hashlib.sha256()

        def counted() -> Iterator[bytes]:
            for part in sent.parts():
                state.update(part)
                report(len(part))
                yield part

        headers = {
            "Authorization": f"Bearer {key}", "Content-Type": CONTENT_TYPE,
            "Content-Length": str(sent.num_bytes),
        }  # fmt: skip
        status, answer = server.ask("POST", PATH, counted(), headers)
        if status != 200:
            raise ServerError(f"{server.url} does not take the head: {_words(status, answer)}")
        version, digest = answer.get("head_version"), answer.get("digest")
        if type(version) is not int or digest != digest_of(state):
            raise ServerError(
                f"{server.url} says that it took another head than was sent ({digest}, sent "
                f"{digest_of(state)}). Push it again."
            )
        return Pushed(self.name, version, digest, sent.num_bytes)


def _words(status: int, answer: dict[str, Any]) -> str:
    error = answer.get("error")
    said = error.get("message") if isinstance(error, dict) else None
    return " ".join(str(said or f"status {status}.").split())[:400]


KINDS: tuple[Kind, ...] = (OwnServer(),)


def push(
    server: Address, head: Head, key: str | None, report: Report = lambda num_bytes: None
) -> Pushed:
    """Swap a head into a running server; ServerError where it is of no kind that takes one."""
    for kind in KINDS:
        if kind.recognises(server):
            return kind.push(server, head, key, report)
    raise ServerError(
        f"{server.url} is no server that takes a head while it runs; expected one of "
        f"{', '.join(kind.name for kind in KINDS)}. Restart it with the head instead."
    )
