"""What goes through a channel between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio

import pytest

from headstart.errors import EngineError
from headstart.server.worker import Channel


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
