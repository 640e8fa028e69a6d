"""One request from body to last byte: a place, a thread to prepare it, the engine, the wire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.server.jobs import Channel, Event
from headstart.server.named_fields import called
from headstart.server.observing import note_of
from headstart.server.prepare import Prepared
from headstart.server.protocol.sampling import SamplingFields
from headstart.server.refusals import STOPPED, Refusal, refusal_of, too_slow
from headstart.server.state import ServerState
from headstart.server.stream import (
    DONE,
    begin_stream,
    encoded,
    events,
    send_part,
    send_refusal,
    send_whole,
    until_gone,
)

_log = logging.getLogger("headstart.server")
_LAST_WORD_SECONDS = 1.0  # for telling a client that reads slowly what went wrong


class Answering(Response):
    """The answer to one request; nothing is done before it is sent."""

    def __init__(
        self, state: ServerState, request: SamplingFields, answer_id: str,
        prepare: Callable[..., Prepared],
    ):  # fmt: skip
        self.state, self.request, self.answer_id = state, request, answer_id
        self._prepare = prepare
        self._is_streaming = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._note = note_of(scope)
        self._note.id, self._note.is_stream = self.answer_id, self.request.stream
        is_told = await until_gone(receive, self._run(send))
        if not is_told and self._note.error is None:  # else it was counted for what went wrong
            self._note.error = "the client went away"
            self.state.tally.aborted += 1

    async def _run(self, send: Send) -> None:
        limit = self.state.options.request_timeout_seconds
        try:
            asked = self.request
            with self.state.gate.entry(asked.num_answers, field=asked.answers_field):
                async with asyncio.timeout(limit):
                    with called(asked.own_names):
                        await self._answer(send)
            self.state.tally.finished += 1
        except TimeoutError:
            await self._refuse(send, too_slow(limit))
        except Exception as error:
            await self._refuse(send, error)

    async def _answer(self, send: Send) -> None:
        state = self.state
        prepared: Prepared = await state.in_thread(
            self._prepare, self.request, self.answer_id, state.model, state.options
        )
        jobs = prepared.jobs
        if prepared.grammar is not None:
            grammar = await state.compiled(prepared.grammar)
            jobs = [replace(job, grammar=grammar.fork()) for job in jobs]
        self._note.prompt = prepared.prompt if state.options.log_prompts else None
        for job in jobs:
            state.metrics.request_started(
                job.id, arrived=self._note.arrived, n=job.num_samples,
                max_tokens=job.asked.params.max_tokens,
            )  # fmt: skip
        channel = Channel(jobs)
        state.worker.submit(channel)
        try:
            if self.request.stream:
                await self._stream(channel, prepared, send)
            else:
                await self._whole(channel, prepared, send)
        finally:
            self._note.results = prepared.writer.results
            state.worker.leave(channel)

    async def _whole(self, channel: Channel, prepared: Prepared, send: Send) -> None:
        while not channel.is_done:
            for event in await self._take(channel):
                prepared.writer.note(event)
        writer = prepared.writer
        if writer.is_large:
            body: bytes = await self.state.in_thread(lambda: encoded(writer.whole()))
        else:
            body = encoded(writer.whole())
        await send_whole(send, body)

    async def _stream(self, channel: Channel, prepared: Prepared, send: Send) -> None:
        writer = prepared.writer
        await begin_stream(send)
        self._is_streaming = True
        await send_part(send, events(writer.first_chunks()))
        while not channel.is_done:
            chunks = []
            for event in await self._take(channel):
                writer.note(event)
                chunks += writer.chunks(event)
            if chunks:
                await send_part(send, events(chunks))
        await send_part(send, events(writer.last_chunks()) + DONE, is_last=True)

    async def _take(self, channel: Channel) -> list[Event]:
        taken = await channel.take()
        if self._note.first_token is None and any(event.update.token_ids for event in taken):
            self._note.first_token = time.perf_counter()
        return taken

    async def _refuse(self, send: Send, error: BaseException) -> None:
        refusal = refusal_of(error)
        self._note.error = refusal.message
        self.state.tally.count(refusal.status, is_stopped=refusal.code == STOPPED)
        if refusal.status == 500 and refusal is not error:
            _log.error("request %s failed", self.answer_id, exc_info=error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._say(send, refusal), _LAST_WORD_SECONDS)

    async def _say(self, send: Send, refusal: Refusal) -> None:
        if self._is_streaming:
            await send_part(send, events([refusal.body]) + DONE, is_last=True)
        else:
            await send_refusal(send, refusal)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"
