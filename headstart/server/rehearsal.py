"""Requests of the server's own before it is ready, so that the first of a client finds all loaded.

They take the way of every request, from a body's bytes to the bytes of a stream, but are neither
counted nor logged.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

from starlette.types import Message

from headstart.server.answering import Answering, prepare_chat
from headstart.server.completions import CompletionRequest, prepare_completion
from headstart.server.intake import Gate, parse
from headstart.server.metrics.series import Series
from headstart.server.protocol.requests import ChatRequest
from headstart.server.recording import ServerMetrics
from headstart.server.state import ServerState, Tally

_COMMON: dict[str, Any] = {"max_tokens": 4, "stream": True, "temperature": 0, "ignore_eos": True}
_PROMPT = {"prompt": [0] * 8, **_COMMON}
_CHAT = {"messages": [{"role": "user", "content": "a"}], **_COMMON}
_TURNS = 2


async def rehearse(state: ServerState) -> None:
    """A few requests, while clients are told to wait; what they count is forgotten."""
    worker, own = state.worker, copy.copy(state)
    assert worker.engine is not None
    own.metrics, own.tally = ServerMetrics(Series("rehearsal")), Tally()
    own.gate = Gate(worker, max_queue=1)
    own.gate.is_open = True
    counted, worker.metrics = worker.metrics, own.metrics
    try:
        for _ in range(_TURNS):
            request = parse(json.dumps(_PROMPT).encode(), CompletionRequest)
            await _answered(Answering(own, request, "cmpl-rehearsal", prepare_completion))
            if state.model.templates is not None:
                chat = parse(json.dumps(_CHAT).encode(), ChatRequest)
                await _answered(Answering(own, chat, "chatcmpl-rehearsal", prepare_chat))
    finally:
        worker.metrics = counted
        worker.engine.clear_stats()


async def _answered(answer: Answering) -> None:
    """A refusal is an answer as well: a template may not like the messages."""
    await answer({"type": "http"}, _stay, _drop)


async def _stay() -> Message:
    """The client does not go away."""
    await asyncio.Event().wait()
    raise AssertionError("an event that is never set")


async def _drop(message: Message) -> None:
    """The client does not look at the answer."""
