"""Servers that take a head while they run: which kind one is, and how each kind is given it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

from headstart.errors import ConfigError, ServerError
from headstart.heads.head import Head
from headstart.push.address import Address, Pushed, Report
from headstart.push.sent_head import CONTENT_TYPE, SentHead, digest_of
from headstart.push.vllm import VllmServer

PATH = "/push_head"
_STATES = ("starting", "ready", "draining", "dead")  # what /health of our server says


class Kind(Protocol):
    """One kind of server."""

    name: str

    def recognises(self, server: Address) -> bool: ...

    def push(self, server: Address, head: Head, key: str | None, report: Report) -> Pushed: ...


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


KINDS: tuple[Kind, ...] = (OwnServer(), VllmServer())


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
