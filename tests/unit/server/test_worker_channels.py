"""What goes through a channel between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from headstart.engine.admission import Asked
from headstart.engine.engine import Engine
from headstart.engine.output import Result, Update
from headstart.errors import EngineError, RequestError
from headstart.server.channels import Channel, Event, Job
from headstart.server.recording import ServerMetrics
from headstart.server.refusals import Refusal
from headstart.server.worker import Worker


def test_a_channel_that_failed_gives_what_came_before_and_then_the_error() -> None:
    async def check() -> None:
        channel = Channel([])
        waiting = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        channel.fail(EngineError("gone"))
        channel.fail(EngineError("later"))
        with pytest.raises(EngineError, match="gone"):
            await waiting

    asyncio.run(check())


class _Idle:
    """As much of an engine as a worker without requests touches."""

    has_work = False
    loop = SimpleNamespace(meanwhile=None, is_ahead=False)


def test_calls_fail_when_the_thread_ends() -> None:
    def ends(engine: Engine) -> None:
        raise SystemExit  # no Exception, which a call would only report

    async def check() -> None:
        worker = Worker(lambda: cast(Engine, _Idle()), cast(ServerMetrics, None))
        worker.start(lambda: None)
        assert await worker.call(lambda engine: engine.has_work) is False
        with pytest.raises(Refusal):
            await asyncio.wait_for(worker.call(ends), 10)
        with pytest.raises(Refusal):
            await asyncio.wait_for(worker.call(ends), 10)

    asyncio.run(check())


def test_any_thread_can_do_something_between_two_steps() -> None:
    def fails(engine: Engine) -> None:
        raise ValueError("as asked")

    async def check() -> None:
        worker = Worker(lambda: cast(Engine, _Idle()), cast(ServerMetrics, None))
        gate, done = threading.Event(), list[str]()
        early = worker.between_steps(lambda engine: gate.wait(10))  # before there is an engine
        given_up = worker.between_steps(lambda engine: done.append("given up"))
        failing = worker.between_steps(fails)
        names = worker.between_steps(lambda engine: threading.current_thread().name)
        assert given_up.cancel()
        worker.start(lambda: None)
        gate.set()
        assert await asyncio.to_thread(early.result, 10) is True
        assert await asyncio.to_thread(names.result, 10) == "engine"
        with pytest.raises(ValueError, match="as asked"):
            failing.result(10)
        assert done == [] and worker.stop(10)
        with pytest.raises(Refusal):
            worker.between_steps(fails)

    asyncio.run(check())


class _Counting(_Idle):
    """Refuses ids that are in use, as an engine does."""

    def __init__(self) -> None:
        self.ids: set[str] = set()

    def submit(self, asked: Asked, *, request_id: str, **options: Any) -> None:
        if request_id in self.ids:
            raise RequestError("in use")
        self.ids.add(request_id)

    def abort(self, request_id: str) -> None:
        self.ids.discard(request_id)


def test_a_channel_ends_only_what_it_submitted() -> None:
    engine = _Counting()
    worker = Worker(lambda: cast(Engine, engine), cast(ServerMetrics, MagicMock()))
    worker.engine, worker._loop = cast(Engine, engine), MagicMock()
    job = Job(cast(Asked, MagicMock()), id="same")
    worker._add(Channel([job]))
    other = Channel([job])
    worker._add(other)
    worker._drop(other)
    assert engine.ids == {"same"}


def event(number: int = 0, end: str | None = None) -> Event:
    result = None if end is None else Result("", [])
    return Event(number, cast(Update, SimpleNamespace(finish_reason=end)), result)


def test_events_are_pushed_while_nothing_else_is_waited_for() -> None:
    """In order: behind one that was not taken, and behind an end, all go the long way."""

    async def check() -> None:
        channel, pushed, takes = Channel([cast(Job, None)] * 2), list[Event](), True

        def push(given: Event) -> bool:
            pushed.append(given)
            return takes

        channel.push = push
        events = [event(number) for number in range(6)]
        channel.put(events[0])  # nobody waits yet
        assert await channel.take() == [events[0]] and not pushed
        waiting = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        channel.put(events[1])
        assert pushed == [events[1]] and not waiting.done()
        takes = False
        channel.put(events[2])
        takes = True
        channel.put(events[3])
        assert pushed == events[1:3]
        assert await waiting == events[2:4]
        waiting = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        last = event(0, "length")
        channel.put(last)
        assert await waiting == [last] and len(pushed) == 2

    asyncio.run(check())


def test_what_a_push_raises_ends_the_channel() -> None:
    async def check() -> None:
        channel, calls = Channel([cast(Job, None)]), list[Event]()

        def push(given: Event) -> bool:
            calls.append(given)
            raise EngineError("no token is left")

        channel.push = push
        waiting = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        channel.put(event())
        with pytest.raises(EngineError, match="no token is left") as caught:
            await waiting
        assert len(calls) == 1
        assert "push" in [entry.name for entry in caught.traceback], "the log shows where"

    asyncio.run(check())


class _Ahead:
    """An engine that is one round ahead: three steps give a token each, the last one ends it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.left = calls, 3
        self.stats = SimpleNamespace(prompt_tokens=0)
        self.loop = SimpleNamespace(meanwhile=None, is_ahead=True)

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def submit(self, asked: Asked, *, request_id: str, **options: Any) -> None:
        self.name = request_id

    def step(self) -> list[Update]:
        self.calls.append("launched")
        self.loop.meanwhile()
        self.calls.append("collected")
        self.left -= 1
        end = None if self.left else "length"
        return [Update(self.name, 0, [self.left], "", [], [], cast(Any, end))]

    def collect(self, name: str) -> Result:
        return Result(name, [])


def test_updates_go_out_when_the_device_has_its_next_round() -> None:
    """Only then the event loop works; the last ones go out at once."""
    calls: list[str] = []
    engine = cast(Engine, _Ahead(calls))
    worker = Worker(lambda: engine, cast(ServerMetrics, MagicMock()))
    worker.engine, worker._loop = engine, MagicMock()
    engine.loop.meanwhile = worker._hand_out

    def called(call: Any, events: list[tuple[Channel, Event]]) -> None:
        calls.append(f"out {events[0][1].update.token_ids}")

    worker._call_in_loop = called  # type: ignore[method-assign]
    worker._add(Channel([Job(cast(Asked, MagicMock(params=SimpleNamespace(n=1))))]))
    for _ in range(3):
        worker._turn(engine)
    assert calls == [
        "launched", "collected",
        "launched", "out [2]", "collected",
        "launched", "out [1]", "collected", "out [0]",
    ]  # fmt: skip


Steps = list[tuple[str, str | None]]  # who gets a token, and how that ends it


class _Held(_Ahead):
    """One round ahead as well: each step gives tokens to some of its requests, or fails."""

    def __init__(self, *steps: Steps | Exception) -> None:
        super().__init__([])
        self.left, self.steps = 1, [*steps]
        self.scheduler = SimpleNamespace(running=[], waiting=[])
        self.pool = SimpleNamespace(num_used=0, num_blocks=1)

    def submit(self, asked: Asked, *, request_id: str, **options: Any) -> None:
        self.calls.append(f"submit {request_id}")

    def step(self) -> list[Update]:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step  # before a round was launched
        self.loop.meanwhile()
        return [Update(name, 0, [7], "", [], [], cast(Any, end)) for name, end in step]

    def cut(self, name: str, reason: str) -> None:
        self.calls.append(f"cut {name}")

    def abort(self, name: str) -> None:
        self.calls.append(f"abort {name}")

    def recover(self) -> None:
        self.calls.append("recover")


class _Loop:
    """An event loop that is there at once."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, call: Any, *arguments: Any) -> None:
        call(*arguments)


HELD: Steps = [("a", "stop"), ("b", None)]  # what the first step gives, and does not hand out


def held(*steps: Steps | Exception, metrics: Any = None) -> tuple[Worker, _Held, list[Channel]]:
    """A worker after its first step, with two requests."""
    engine = _Held(HELD, *steps)
    worker = Worker(lambda: cast(Engine, engine), metrics or cast(ServerMetrics, MagicMock()))
    worker.engine, worker._loop = cast(Engine, engine), cast(Any, _Loop())
    engine.loop.meanwhile = worker._hand_out
    asked = cast(Asked, MagicMock(params=SimpleNamespace(n=1)))
    channels = [Channel([Job(asked, learned_as="chat", id=name)]) for name in "ab"]
    for channel in channels:
        worker._add(channel)
    worker._turn(worker.engine)
    assert [came(channel) for channel in channels] == [[], []]
    engine.calls.clear()
    return worker, engine, channels


def came(channel: Channel) -> list[str]:
    """Events that nobody took: their end and whether they have a result; at last a failure."""
    found = [f"{e.update.finish_reason} {e.result is not None}" for e in channel._events]
    return found if channel._failure is None else [*found, "failed"]


def test_a_request_that_has_just_ended_counts_and_is_not_learned_from_when_its_client_leaves() -> (
    None
):
    """The client did not get the end of it; the other request goes on as if nothing had been."""
    worker, engine, (first, other) = held()
    learned: list[str] = []
    worker.on_result = lambda job, result: learned.append(job.id)
    worker._drop(first)
    assert learned == [] and engine.calls == []
    assert came(first) == ["stop True"] and came(other) == ["None False"]


def test_where_updates_do_not_go_out_requests_have_what_came_before_or_an_error() -> None:
    """Two end, and the second one's numbers cannot be kept; the step fails with that."""

    def finished(result: Result) -> None:
        if result.request_id == "b":
            raise ValueError("no such series")

    metrics = MagicMock(request_finished=finished)
    worker, engine, channels = held([("b", "stop")], [], metrics=metrics)
    for _ in range(2):
        worker._turn(cast(Engine, engine))
    assert [came(channel) for channel in channels] == [["stop True"], ["None False", "failed"]]
    assert engine.calls == ["recover"] and not worker._open


def test_work_between_two_steps_waits_until_updates_went_out() -> None:
    worker, _, channels = held()
    seen = worker.between_steps(lambda own: [came(channel) for channel in channels])
    assert came(channels[0]) == []
    worker._inbox.take(wait=False)
    assert seen.result(0) == [["stop True"], ["None False"]]


def test_a_request_whose_time_is_up_has_what_the_last_step_gave() -> None:
    """Its first token may be among that: it is then cut, and does not fail."""
    worker, engine, channels = held()
    for channel in channels:
        worker._cut(channel, RuntimeError("too slow"))
    assert engine.calls == ["cut b"], "a has ended by itself"
    assert [came(channel) for channel in channels] == [["stop True"], ["None False"]]


def test_what_a_step_gave_goes_out_although_the_next_one_fails() -> None:
    worker, engine, channels = held(RuntimeError("no memory"))
    worker._turn(cast(Engine, engine))
    assert [came(channel) for channel in channels] == [["stop True"], ["None False", "failed"]]
    assert engine.calls == ["recover"]
