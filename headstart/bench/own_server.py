"""Our own server as a child process, so that a MODEL is measured as its users would meet it.

Over HTTP and from another process: the load generator takes no time of the engine's. The prefix
cache is off, since every variant is asked the same prompts.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from headstart.bench.variants import Drafts, Variant
from headstart.errors import ServerError
from headstart.processes import python_command

_FEWEST_RUNNING = 64
_STOP_SECONDS = 60.0
_MOST_LINES = 200


@contextmanager
def own_servers(
    model: str, variants: Sequence[Variant], *, max_concurrency: int, flags: Sequence[str]
) -> Iterator[list[Variant]]:
    """The variants with the address of a server each: one server for all that need the same flags.

    All run for the whole time, so that variants can alternate; idle ones take memory, not time.
    """
    started = flags_of_servers(variants, max_concurrency=max_concurrency, flags=flags)
    with ExitStack() as stack:
        urls = {own: stack.enter_context(_served(model, own_flags)).url
                for own, own_flags in started.items()}  # fmt: skip
        yield [replace(variant, url=urls[variant.server_flags]) for variant in variants]


def flags_of_servers(
    variants: Sequence[Variant], *, max_concurrency: int, flags: Sequence[str]
) -> dict[tuple[str, ...], list[str]]:
    """By the flags that variants have of their own: all flags of the server that these share."""
    found = {}
    for own in dict.fromkeys(variant.server_flags for variant in variants):
        same = [variant for variant in variants if variant.server_flags == own]
        needed = _needed_flags([variant.drafts for variant in same], max_concurrency)
        found[own] = [*needed, *own, *flags]
    return found


def _needed_flags(drafts: Sequence[Drafts | None], max_concurrency: int) -> list[str]:
    """Room for every stream, and a head that may draft as many as any variant asks for."""
    numbers = [number for number in drafts if isinstance(number, int)]
    speculate = "auto" if "auto" in drafts else str(max(numbers, default=0))
    running = str(max(_FEWEST_RUNNING, max_concurrency))
    return [
        "--speculate", speculate, "--no-prefix-caching", "--max-running-requests", running,
        "--max-queue", running,
    ]  # fmt: skip


class _Process:
    """A server process, its address once it has one, and the last lines it said."""

    def __init__(self, command: Sequence[str]) -> None:
        self.url = ""
        self.lines: list[str] = []
        self._is_decided = threading.Event()  # ready, or never going to be
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines = [*self.lines[-_MOST_LINES:], line.rstrip("\n")]
            if found := re.search(r"ready at (http://\S+?),", line):
                self.url = found[1]
                self._is_decided.set()
        self._is_decided.set()

    def wait_ready(self) -> None:
        self._is_decided.wait()
        if not self.url:
            code = self.process.wait()
            said = next((line for line in reversed(self.lines) if line.strip()), "nothing")
            said = said.rstrip(".")
            raise ServerError(
                f"our own server ended with {code} before it was ready; its last line: {said}. "
                "Start it by itself (`headstart serve`) to see more."
            )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextmanager
def _served(model: str, flags: Sequence[str]) -> Iterator[_Process]:
    server = _Process(python_command("headstart", "serve", model, "--port", "0", *flags))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
