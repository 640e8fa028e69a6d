"""Between event loop and engine: what is asked, what came of it, and the channel it comes through.

A channel carries everything of one HTTP request, which may be several prompts (completions) with
several samples each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.engine.engine import Asked
from headstart.engine.outputs import Result, Update


@dataclass(frozen=True)
class Job:
    """One prompt, read and checked."""

    id: str
    asked: Asked
    priority: int = 0
    grammar: Any = None

    @property
    def num_samples(self) -> int:
        return self.asked.params.n


@dataclass(frozen=True)
class Event:
    """What one step added to a sample of prompt `number`; the prompt's last one has its result."""

    number: int
    update: Update
    result: Result | None


class Channel:
    """Events of one HTTP request, in order; all methods belong to the event loop."""

    def __init__(self, jobs: Sequence[Job]):
        self.jobs = jobs
        self._events: deque[Event] = deque()
        self._failure: Exception | None = None
        self._wake = asyncio.Event()
        self._unfinished = len(jobs)

    @property
    def is_open(self) -> bool:
        """Whether the engine may still work for it."""
        return self._unfinished > 0

    @property
    def is_done(self) -> bool:
        """Whether everything has come and has been taken."""
        return self._unfinished == 0 and not self._events

    def put(self, event: Event) -> None:
        self._unfinished -= event.result is not None
        self._events.append(event)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake.set()

    async def take(self) -> list[Event]:
        """All events since the last time, at least one; raises what the engine raised."""
        while not self._events:
            if self._failure is not None:
                raise self._failure.with_traceback(None)  # others may have raised it, too
            self._wake.clear()
            await self._wake.wait()
        events = list(self._events)
        self._events.clear()
        return events
