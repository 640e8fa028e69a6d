"""Clients of the soak: most read their answer to its end, the others go away in various ways."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from server_process import DONE, asked

# How a client behaves, and how often.
BEHAVIOURS = {
    "stream": 60, "whole": 15, "slow": 5, "leave while it streams": 10, "leave at once": 5,
    "send half a request": 5,
}  # fmt: skip
_LEAVING = ("leave while it streams", "leave at once", "send half a request")
_SLOW_SECONDS = 0.02  # between two reads


@dataclass(frozen=True)
class Case:
    """A request, and the answer that it has to get."""

    fields: dict[str, Any]
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass
class Tally:
    """What came of all requests."""

    asked: Counter[str] = field(default_factory=Counter)
    complete: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    error_seconds: list[float] = field(default_factory=list)  # when an error came


async def keep_asking(
    port: int, cases: list[Case], draw: random.Random, until: Callable[[], bool], tally: Tally
) -> None:
    """One client after the other, on one of the places."""
    while not until():
        (behaviour,) = draw.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
        tally.asked[behaviour] += 1
        case = draw.choice(cases)
        try:
            if behaviour in _LEAVING:
                await _LEAVERS[behaviour](port, case, draw)
            else:
                await _stay(port, case, behaviour, tally)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            tally.problems.append(f"{behaviour}: {type(error).__name__}: {error}")


async def _stay(port: int, case: Case, behaviour: str, tally: Tally) -> None:
    fields = {**case.fields, "return_token_ids": True, "stream": behaviour != "whole"}
    parts = []
    async with asked(port, fields) as answer:
        async for part in answer.parts():
            parts.append(part)
            if behaviour == "slow":
                await asyncio.sleep(_SLOW_SECONDS)
    body = b"".join(parts)
    if answer.status != 200 or b'"error"' in body:
        tally.problems.append(f"{behaviour}: {answer.status} {body[-300:].decode()}")
        return
    found = _of_stream(body) if fields["stream"] else _of_whole(body)
    if found != (case.token_ids, case.text, case.finish_reason):
        tally.problems.append(f"{behaviour}: {found} for {case}")
        return
    tally.complete += 1
    tally.tokens += len(case.token_ids)


def _of_whole(body: bytes) -> tuple[list[int], str, str]:
    (choice,) = json.loads(body)["choices"]
    return choice["token_ids"], choice["text"], choice["finish_reason"]


def _of_stream(body: bytes) -> tuple[list[int], str, str]:
    *events, done = body.strip().split(b"\n\n")
    assert done == DONE, done
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    ids = [token for choice in choices for token in choice["token_ids"]]
    text = "".join(choice["text"] for choice in choices)
    return ids, text, choices[-1]["finish_reason"]


async def _leave_while_it_streams(port: int, case: Case, draw: random.Random) -> None:
    left = draw.randrange(1, 30)
    async with asked(port, {**case.fields, "stream": True}) as answer:
        async for _ in answer.parts():
            left -= 1
            if not left:
                return


async def _leave_at_once(port: int, case: Case, draw: random.Random) -> None:
    asking = asyncio.create_task(_leave_while_it_streams(port, case, draw))
    await asyncio.sleep(draw.random() * 0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _send_half(port: int, case: Case, draw: random.Random) -> None:
    body = json.dumps(case.fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    data = head + body
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data[: draw.randrange(1, len(data))])
    await asyncio.sleep(draw.random() * 0.05)
    writer.transport.abort()


_LEAVERS: dict[str, Callable[[int, Case, random.Random], Awaitable[None]]] = {
    "leave while it streams": _leave_while_it_streams,
    "leave at once": _leave_at_once,
    "send half a request": _send_half,
}


async def until_error(port: int, fields: dict[str, Any], tally: Tally) -> None:
    """Ask for a long answer that the engine will not live to give; note when the error came."""
    try:
        async with asked(port, fields) as answer:
            body = b"".join([part async for part in answer.parts()])
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        tally.problems.append(f"no error but {type(error).__name__}: {error}")
        return
    if b'"code":"engine_error"' in body:
        tally.error_seconds.append(time.monotonic())
    else:
        tally.problems.append(f"{answer.status} {body[-300:].decode()}")
