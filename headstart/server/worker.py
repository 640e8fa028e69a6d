"""The thread of the engine.

Only this thread touches the engine, from loading to the end. The event loop sends it calls through
an inbox. The results of a step go back with one call into the loop, however many requests they are
for (`channels.py`); where the device is one round ahead, they go when the next round is launched. A
step that raises ends the open requests with an error; the engine goes on if its state is consistent
afterwards, and the thread ends if it is not.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headstart.engine.engine import Engine
from headstart.engine.output import Result, Update
from headstart.errors import EngineError, HeadstartError
from headstart.server.channels import Channel, Event, Inbox, Job
from headstart.server.recording import ServerMetrics
from headstart.server.refusals import engine_failed

_log = logging.getLogger("headstart.server")
_RECOVERIES = 3  # failed steps within `_RECOVERY_SECONDS` after which the engine goes on
_RECOVERY_SECONDS = 60.0
T = TypeVar("T")
CUT = "request_timeout"  # the `stop_reason` of answers whose time was up


class _Open:
    """A job inside the engine."""

    def __init__(self, job: Job, number: int, channel: Channel):
        self.job, self.number, self.channel = job, number, channel
        self.unfinished = job.num_samples
        self.num_tokens = 0  # of its answers, so far
        self.is_left = False  # its client is gone, so that nothing is learned from it


class Worker:
    """Runs an engine; the public methods are for the event loop."""

    def __init__(self, make_engine: Callable[[], Engine], metrics: ServerMetrics):
        self._make_engine, self.metrics = make_engine, metrics
        self._inbox = Inbox()
        self._open: dict[str, _Open] = {}  # the engine thread's,
        self._held: list[Update] = []  # and what it has not handed out yet
        self._channels: set[Channel] = set()  # the event loop's
        self.on_result: Callable[[Job, Result], None] | None = None  # what learns from answers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._failures: list[float] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.step_started: float | None = None
        self.engine: Engine | None = None
        self.failure: BaseException | None = None  # why there is no engine (any more)

    def start(self, on_change: Callable[[], None]) -> None:
        """Load the model and run; `on_change` is called in the loop when it is ready, or failed."""

        def changed() -> None:
            if self.failure is not None:  # also those that wait in the inbox
                self.fail_all(engine_failed())
            on_change()

        self._loop, self._on_change = asyncio.get_running_loop(), changed
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.failure is None

    @property
    def num_queued(self) -> int:
        """Calls that the engine's thread has not taken yet."""
        return len(self._inbox)

    def submit(self, channel: Channel) -> None:
        if self.failure is not None:
            self._forget(channel)
            channel.fail(engine_failed())
            return
        self._channels.add(channel)
        self._inbox.put(lambda: self._add(channel))

    def cut(self, channel: Channel, error: Exception) -> None:
        """Time is up: end its requests with what they have; where that is nothing, with `error`."""
        channel.is_cut = True
        self._inbox.put(lambda: self._cut(channel, error))

    def leave(self, channel: Channel) -> None:
        """The client is gone or served: what still runs ends; its memory is free a step later."""
        self._channels.discard(channel)
        if channel.is_open:
            self._inbox.put(lambda: self._drop(channel))

    def between_steps(self, work: Callable[[Engine], T]) -> Future[T]:
        """Do something with the engine, in its thread, between two steps; for any thread."""

        def with_engine() -> T:
            assert self.engine is not None
            return work(self.engine)

        # Such work may take long, and what the last step gave must not wait for it.
        return self._inbox.ask(with_engine, before=self._hand_out)

    async def call(self, work: Callable[[Engine], T]) -> T:
        """The same for the event loop."""
        return await asyncio.wrap_future(self.between_steps(work))

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, whatever the engine is doing."""
        for channel in self._channels:
            channel.fail(error)

    def stop(self, seconds: float) -> bool:
        """End the thread after the current step; False if that takes too long."""
        self._inbox.put(self._end)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _end(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            self.engine = self._make_engine()
            self.engine.loop.meanwhile = self._hand_out
            self._call_in_loop(self._on_change)
            while not self._is_stopping:
                self._turn(self.engine)
        except BaseException as error:
            self.failure = error
            self._fail_open()
            self._call_in_loop(self._on_change)
        finally:
            self._inbox.close()

    def _turn(self, engine: Engine) -> None:
        """Take new calls, wait if there is nothing to do, advance all requests by one step."""
        self._inbox.take(wait=not engine.has_work)
        if not engine.has_work or self._is_stopping:
            self._hand_out()
            return
        num_before = engine.stats.prompt_tokens
        self.step_started = started = time.perf_counter()
        try:
            updates = engine.step()
        except Exception as error:
            self._recover(engine, error)
            return
        finally:
            self.step_started = None
        seconds = time.perf_counter() - started
        num_tokens = engine.stats.prompt_tokens - num_before
        num_tokens += sum(len(update.token_ids) for update in updates)
        self.metrics.observe_step(seconds, num_tokens)
        self._hand_out()
        self._held = updates
        if not (engine.has_work and engine.loop.is_ahead):
            self._hand_out()

    def _add(self, channel: Channel) -> None:
        assert self.engine is not None
        try:
            for number, job in enumerate(channel.jobs):
                self.engine.submit(
                    job.asked, request_id=job.id, priority=job.priority, grammar=job.grammar,
                    cache_salt=job.cache_salt, keeps_states=job.learned_as is not None,
                )  # fmt: skip
                self._open[job.id] = _Open(job, number, channel)
        except Exception as error:
            if not isinstance(error, HeadstartError):
                _log.error("the engine does not take request %s", channel.name, exc_info=error)
            if job.id not in self._open:
                self.engine.abort(job.id)  # whatever of it came in
            self._drop(channel)
            self._forget(channel)
            self._call_in_loop(channel.fail, error)

    def _forget(self, channel: Channel) -> None:
        """Requests that never came in have no result."""
        for job in channel.jobs:
            self.metrics.request_failed(job.id)

    def _drop(self, channel: Channel) -> None:
        assert self.engine is not None
        for job in channel.jobs:
            if (found := self._open.get(job.id)) is not None and found.channel is channel:
                found.is_left = True
        self._hand_out()  # a request that has just ended has its result there
        for job in channel.jobs:
            if (found := self._open.get(job.id)) is not None and found.channel is channel:
                del self._open[job.id]
                self.engine.abort(job.id)
                self.metrics.request_finished(self.engine.collect(job.id))

    def _cut(self, channel: Channel, error: Exception) -> None:
        assert self.engine is not None
        self._hand_out()
        found = [self._open.get(job.id) for job in channel.jobs]
        left = [own for own in found if own is not None and own.channel is channel]
        if len(left) < len(channel.jobs) or any(job.num_tokens for job in left):
            for open_job in left:
                self.engine.cut(open_job.job.id, CUT)
        else:
            self._drop(channel)
            self._call_in_loop(channel.fail, error)

    def _hand_out(self) -> None:
        """Hand out what the last step gave.

        Where a round is under way that is done in the next step, when the device has the round
        after it: then the event loop works while this thread waits for the device. The two take
        turns otherwise, since only one of them can run Python, and the device would wait for both.
        """
        updates, self._held = self._held, []
        if not updates:
            return
        engine = self.engine
        assert engine is not None
        events: list[tuple[Channel, Event]] = []
        try:
            for update in updates:
                open_job = self._open.get(update.request_id)
                if open_job is None:
                    continue
                self.metrics.tokens(update.request_id, update.sample, len(update.token_ids))
                open_job.num_tokens += len(update.token_ids)
                is_end = update.finish_reason is not None
                result = self._result(engine, open_job) if is_end else None
                events.append((open_job.channel, Event(open_job.number, update, result)))
        finally:  # whatever fails at one request, those before it have theirs
            self._call_in_loop(_deliver, events)

    def _result(self, engine: Engine, open_job: _Open) -> Result | None:
        """The result, when the last sample has ended."""
        open_job.unfinished -= 1
        if open_job.unfinished:
            return None
        result = engine.collect(open_job.job.id)
        self.metrics.request_finished(result)
        del self._open[open_job.job.id]  # only now: where these fail, the request fails with them
        is_kept = open_job.job.learned_as is not None and not open_job.is_left
        if self.on_result is not None and is_kept:
            try:
                self.on_result(open_job.job, result)
            except Exception:  # learning never ends a request
                _log.exception("an answer could not be handed to learning")
        return result

    def _recover(self, engine: Engine, error: Exception) -> None:
        """Fail all open requests; raise if the engine failed too often, or cannot recover."""
        _log.error(
            "a step of the engine failed: %d requests end with it (%d running, %d waiting, %d of "
            "%d K/V blocks in use)", len(self._open), len(engine.scheduler.running),
            len(engine.scheduler.waiting), engine.pool.num_used, engine.pool.num_blocks,
            exc_info=error,
        )  # fmt: skip
        self._fail_open()
        now = time.monotonic()
        self._failures = [at for at in self._failures if now - at < _RECOVERY_SECONDS] + [now]
        if len(self._failures) > _RECOVERIES:
            raise EngineError(f"{len(self._failures)} steps failed within a minute.") from error
        engine.recover()
        _log.warning("the engine goes on after a failed step")

    def _fail_open(self) -> None:
        """End all requests with one error: its cause was logged, and tracebacks take time."""
        self._hand_out()
        gone, self._open = self._open, {}
        for open_job in gone.values():
            self.metrics.request_failed(open_job.job.id)
        for channel in {id(o.channel): o.channel for o in gone.values()}.values():
            self._call_in_loop(channel.fail, engine_failed())

    def _call_in_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


def _deliver(events: list[tuple[Channel, Event]]) -> None:
    for channel, event in events:
        channel.put(event)
