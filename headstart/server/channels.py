"""What goes between the engine's thread and others: calls into it, events of a request out of it.

A channel carries everything of one HTTP request, which may be several prompts (completions) with
several samples each.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from headstart.engine.admission import Asked
from headstart.engine.output import Result, Update
from headstart.server.refusals import engine_failed

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One prompt, read and checked."""

    asked: Asked
    priority: int = 0
    grammar: Any = None
    cache_salt: str | None = None
    learned_as: str | None = None  # its kind where a server with --learn may keep it
    # Never a client's: another client's request with the same one would be ended with it.
    id: str = field(default_factory=lambda: secrets.token_hex(16))

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

    def __init__(self, jobs: Sequence[Job], name: str = ""):
        """`name`: the id of the answer, for the log."""
        self.jobs, self.name = jobs, name
        self._events: deque[Event] = deque()
        self._failure: Exception | None = None
        self._is_own_failure = False  # raised by `push`, and so in no other channel
        self._wake = asyncio.Event()
        self._unfinished = len(jobs)
        self.is_cut = False  # whether its time was up before everything had come
        # What takes an event while nothing but events is waited for; False: `take` gives it.
        self.push: Callable[[Event], bool] | None = None
        self._is_taking = False

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
        if self._pushed(event):
            return
        self._events.append(event)
        self._wake.set()

    def _pushed(self, event: Event) -> bool:
        """Whether an event was taken where it came: waking a task for it takes as long again."""
        if self.push is None or not self._is_taking or self._events or self._failure is not None:
            return False
        if event.update.finish_reason is not None:
            return False
        try:
            return self.push(event)
        except Exception as error:
            self._failure, self._is_own_failure = error, True
            self._wake.set()
            return True

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake.set()

    async def take(self) -> list[Event]:
        """All events since the last time, at least one; raises what the engine raised."""
        while not self._events:
            if (failure := self._failure) is not None:
                # Of one that others raise as well, the traceback would name all of them.
                raise failure if self._is_own_failure else failure.with_traceback(None)
            self._wake.clear()
            self._is_taking = True
            try:
                await self._wake.wait()
            finally:
                self._is_taking = False
        events = list(self._events)
        self._events.clear()
        return events


class Inbox:
    """Calls for one thread, in the order in which they came; it closes it when it ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked: set[Future[Any]] = set()  # that have no answer yet
        self._is_closed = False

    def __len__(self) -> int:
        return self._calls.qsize()

    def put(self, call: Callable[[], Any]) -> None:
        """Something to be done without an answer."""
        self._calls.put(call)

    def ask(self, work: Callable[[], T], *, before: Callable[[], None] | None = None) -> Future[T]:
        """The same with its result, or what it raised; what is given up in time is not done.

        before: called ahead of it; what that raises is the thread's failure, and no answer.
        """
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            if before is not None:
                before()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise engine_failed()
            self._asked.add(done)
            self._calls.put(run)
        done.add_done_callback(self._answered)
        return done

    def _answered(self, done: Future[Any]) -> None:
        with self._lock:
            self._asked.discard(done)

    def take(self, *, wait: bool) -> None:
        """Do everything that is there; wait for the first call if there is none."""
        try:
            self._calls.get(block=wait)()
            while True:
                self._calls.get_nowait()()
        except Empty:
            return

    def close(self) -> None:
        """The thread has ended: every call that waits gets an error that says so."""
        with self._lock:
            self._is_closed, left = True, list(self._asked)
        for done in left:
            if done.running() or done.set_running_or_notify_cancel():
                done.set_exception(engine_failed())
