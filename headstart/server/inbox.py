"""Calls that wait for one thread: what others want done there, in the order in which they came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from headstart.server.refusals import engine_failed

T = TypeVar("T")


class Inbox:
    """Filled by any thread, emptied by one, which closes it when it ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked: set[Future[Any]] = set()  # that have no answer yet
        self._is_closed = False

    def __len__(self) -> int:
        return self._calls.qsize()

    def put(self, call: Callable[[], Any]) -> None:
        """Something to be done; nobody waits for it."""
        self._calls.put(call)

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """The same with its result, or what it raised; what is given up in time is not done."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
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
        """The thread has ended: those who wait are told so."""
        with self._lock:
            self._is_closed, left = True, list(self._asked)
        for done in left:
            if done.running() or done.set_running_or_notify_cancel():
                done.set_exception(engine_failed())
