"""Requests of the server's own before it is ready, so that the first of a client finds all loaded.

They take the way of every request, from a body's bytes to the bytes of a stream, but are neither
counted nor logged.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from typing import Any

from starlette.types import Message, Scope

from headstart.errors import first_line
from headstart.server.answering import Answering
from headstart.server.completions import CompletionRequest, prepare_completion
from headstart.server.intake import Gate, parse
from headstart.server.metrics.series import Series
from headstart.server.preparation import prepare_chat
from headstart.server.protocol.requests import ChatRequest
from headstart.server.recording import ServerMetrics
from headstart.server.state import ServerState, Tally
from headstart.server.wire import record_of

_COMMON: dict[str, Any] = {"max_tokens": 4, "stream": True, "temperature": 0, "ignore_eos": True}
_PROMPT = {"prompt": [0] * 8, **_COMMON}
_CHAT = {"messages": [{"role": "user", "content": "a"}], **_COMMON}
_TURNS = 2
_MOST_SECONDS = 30.0  # for all of them
_log = logging.getLogger("headstart.server")


async def rehearse(state: ServerState) -> None:
    """A few requests, while clients are told to wait; what they count is forgotten.

    Whatever becomes of them, the server can be asked afterwards.
    """
    worker, own = state.worker, copy.copy(state)
    assert worker.engine is not None
    own.metrics, own.tally = ServerMetrics(Series("rehearsal")), Tally()
    own.gate = Gate(worker, max_queue=1)
    own.gate.is_open = True
    counted, worker.metrics = worker.metrics, own.metrics
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            await _ask_all(own)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a library that ends in a panic, too
        _log.warning("a request of the server's own failed: %s", first_line(error)[:200])
    finally:
        worker.metrics = counted
        worker.engine.clear_stats()


async def _ask_all(state: ServerState) -> None:
    completion = parse(json.dumps(_PROMPT).encode(), CompletionRequest)
    for _ in range(_TURNS):
        await _answered(Answering(state, completion, "cmpl-rehearsal", prepare_completion))
    chat = parse(json.dumps(_CHAT).encode(), ChatRequest)
    for _ in range(_TURNS if state.model.templates is not None else 0):
        refused = await _answered(Answering(state, chat, "chatcmpl-rehearsal", prepare_chat))
        if refused is not None:  # templates may not like the messages
            _log.info("a chat of the server's own was refused: %s", refused)
            break


async def _answered(answer: Answering) -> str | None:
    """The message of a refusal, or None."""
    scope: Scope = {"type": "http"}
    await answer(scope, _stay, _drop)
    return record_of(scope).error


async def _stay() -> Message:
    """The client does not go away."""
    await asyncio.Event().wait()
    raise AssertionError("an event that is never set")


async def _drop(message: Message) -> None:
    """The client does not look at the answer."""
