"""What goes through a channel between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from headstart.engine.engine import Engine
from headstart.engine.output import Result, Update
from headstart.engine.request import Asked
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
        with pytest.raises(EngineError, match="no token is left"):
            await waiting
        assert len(calls) == 1

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
