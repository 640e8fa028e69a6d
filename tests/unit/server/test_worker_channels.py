"""What goes through a channel between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from headstart.engine.engine import Engine
from headstart.engine.request import Asked
from headstart.errors import EngineError, RequestError
from headstart.server.channels import Channel, Job
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
