"""The server's side of process.py: sends a grammar, waits a limited time, checks the result."""

from __future__ import annotations

import json
import re
import socket
import threading
import time

from headstart.errors import RequestError
from headstart.server.forks import WAIT_FACTOR, ForkServer
from headstart.server.grammars.process import THREADS
from headstart.server.refusals import unavailable

_AT_ONCE = 4  # grammars side by side: a slow one must not keep the others waiting


class CompilerProcess:
    """Compiles grammars in another process, each in a fork that limits end."""

    def __init__(self, tokenizer_info: str, *, max_seconds: float, max_memory: int):
        self._max_seconds, self._max_memory, self._threads = max_seconds, max_memory, THREADS
        self._max_wait = WAIT_FACTOR * max_seconds
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._forks = ForkServer(
            "headstart.server.grammars.process", tokenizer_info.encode(), "compiles grammars"
        )

    def compile(self, what: str, text: str) -> str:
        """The compiled grammar, as xgrammar writes it; RequestError says why there is none."""
        if not self._places.acquire(timeout=self._max_wait):
            raise unavailable(
                "too many grammars are being compiled; try again later.", code="grammars_busy"
            )
        try:
            facts, compiled, seconds = self._ask(text)
        finally:
            self._places.release()
        if not facts and seconds >= self._max_wait:
            raise unavailable(
                f"the machine was too busy to compile the {what}; try again later.",
                code="grammars_busy",
            )
        if not facts and seconds >= self._max_seconds / self._threads:  # the limit is of them all
            raise RequestError(
                f"the {what} takes more than {self._max_seconds:g} s to compile. Make it simpler: "
                "fewer repetitions, fewer levels."
            )
        _check(what, facts, self._max_memory)
        return compiled.decode()

    def close(self) -> None:
        self._forks.close()

    def _ask(self, text: str) -> tuple[dict[str, str], bytes, float]:
        """What the process says (nothing where it was killed), its result, and seconds."""
        with self._forks.connect(self._limits) as ours:
            started = time.monotonic()
            try:
                ours.settimeout(self._max_wait)
                ours.sendall(text.encode("utf-8", "surrogatepass"))
                ours.shutdown(socket.SHUT_WR)
                head, compiled = _read(ours, started + self._max_wait)
            except OSError:  # no time is left, or the process is gone
                head, compiled = b"", b""
        return json.loads(head or b"{}"), compiled, time.monotonic() - started

    @property
    def _limits(self) -> bytes:
        limits = {
            "max_seconds": self._max_seconds, "max_wait": self._max_wait,
            "max_memory": self._max_memory, "threads": self._threads,
        }  # fmt: skip
        return json.dumps(limits).encode()


def _read(stream: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """All that comes up to the end: the first line, and the rest."""
    parts = []
    while part := stream.recv(1 << 20):
        parts.append(part)
        stream.settimeout(max(0.001, deadline - time.monotonic()))
    head, _, rest = b"".join(parts).partition(b"\n")
    return head, rest


def _check(what: str, facts: dict[str, str], max_memory: int) -> None:
    if not facts:
        raise RequestError(
            f"the {what} cannot be compiled: the compiler broke down. Make it smaller or simpler."
        )
    if "memory" in facts:
        raise RequestError(
            f"the {what} needs more than {max_memory >> 20} MiB to compile. Make it smaller."
        )
    if "error" in facts:
        raise RequestError(f"the {what} cannot be used: {_sentence(facts['error'])}.")
    if "Warning" in facts["warnings"]:
        said = _sentence(facts["warnings"])
        if said.startswith("oneOf"):
            raise RequestError(
                f"the {what} has oneOf with branches that one value may fit at once, which cannot "
                "be enforced. Give each branch a required property with a const of its own, use "
                "anyOf, or set strict to false."
            )
        # Behind a semicolon xgrammar says what it would do instead, which is not done here.
        raise RequestError(
            f"the {what} asks for something that cannot be enforced: {said.partition(';')[0]}. Set "
            "strict to false to go without it, or say it in another way."
        )


def _sentence(said: str) -> str:
    """The first thing that xgrammar said, without time and place in its source."""
    line = next((line for line in said.splitlines() if line.strip()), "no reason given")
    line = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", line)
    line = re.sub(r"^(Warning|Error): |Check failed: \(.*?\) is false: ", "", line)
    return line.strip().rstrip(".")[:300]
