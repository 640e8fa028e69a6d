"""One request from body to last byte: a place, a thread to prepare it, the engine, the wire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.server.access import key_in, salt_of_key
from headstart.server.answers.writer import Writer
from headstart.server.channels import Channel, Event
from headstart.server.intake import check_name
from headstart.server.preparation import Prepared
from headstart.server.protocol.requests import SamplerFields, SamplingFields
from headstart.server.refusals import Refusal, refusal_of, renamed, too_slow
from headstart.server.state import ServerState
from headstart.server.templates.client import in_thread
from headstart.server.wire import (
    DONE,
    PartWriter,
    begin_stream,
    encoded,
    named_events,
    plain_events,
    record_of,
    send_part,
    send_refusal,
    send_whole,
    until_gone,
)

_log = logging.getLogger("headstart.server")
_ERROR_SECONDS = 1.0  # for sending an error to a client that reads slowly
_LAST_SECONDS = 5.0  # for what was written when time was up


def answer_route(
    state: ServerState, kind: type[SamplerFields], prefix: str, prepare: Callable[..., Prepared],
    *, convert: Callable[[Any], SamplingFields] = lambda body: body,
) -> Callable[[Request], Awaitable[Response]]:  # fmt: skip
    """What a route does that answers bodies of this kind; ids of answers begin with `prefix`.

    `prepare` gets what `convert` makes of a body, and the body itself where that is another one.
    """

    async def answer(request: Request) -> Response:
        state.gate.check()
        body = await state.bodies.read(request, kind)
        check_name(body.model, state.names)
        asked = convert(body)
        asked.check(state.options)
        salt = body.cache_salt
        if state.options.separate_key_caches:
            salt = salt_of_key(key_in(request.headers), salt)
        own = prepare if asked is body else partial(prepare, body)
        name = asked.request_id or secrets.token_hex(16)
        learning = state.learning
        is_kept = (
            learning is not None
            and body.headstart.learn
            and body.store is not False
            and learning.may_keep(key_in(request.headers))
        )
        return Answering(state, asked, f"{prefix}{name}", own, salt, is_kept=is_kept)

    return answer


class Answering(Response):
    """The answer to one request; nothing is done before it is sent."""

    def __init__(
        self, state: ServerState, request: SamplingFields, answer_id: str,
        prepare: Callable[..., Prepared], cache_salt: str | None = None, *, is_kept: bool = False,
    ):  # fmt: skip
        """is_kept: the head may learn from it."""
        self._cache_salt, self._is_kept = cache_salt, is_kept
        self.state, self.request, self.answer_id = state, request, answer_id
        self._prepare = prepare
        self._writer: Writer | None = None  # of a stream that has begun
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._record, self._path = record_of(scope), scope.get("path", "")
        self._scope = scope
        self._record.id, self._record.is_stream = self.answer_id, self.request.stream
        is_sent = await until_gone(receive, self._run(send))
        if not is_sent and self._record.error is None:  # else it was counted for what went wrong
            self._record.error = "the client went away"
            self.state.tally.aborted += 1

    async def _run(self, send: Send) -> None:
        limit = self.state.options.request_timeout_seconds
        deadline = asyncio.get_running_loop().time() + limit
        try:
            asked = self.request
            with self.state.gate.entry(asked.num_answers, field=asked.answers_field):
                async with asyncio.timeout_at(deadline) as timeout:
                    is_cut = await self._answer(send, timeout, deadline)
            self.state.tally.finished += not is_cut
            self.state.tally.aborted += is_cut
        except TimeoutError:
            await self._refuse(send, too_slow(limit))
        except Exception as error:
            await self._refuse(send, renamed(error, self.request.own_names))

    async def _answer(self, send: Send, timeout: asyncio.Timeout, deadline: float) -> bool:
        """Send the answer; whether its time was up before it was complete.

        The engine then ends it with what it has, for which `timeout` leaves some time.
        """
        state = self.state
        prepared = await in_thread(
            state.pool, state.model.templates,
            self._prepare, self.request, self.answer_id, state.model, state.options,
        )  # fmt: skip
        jobs = prepared.jobs
        if prepared.grammar is not None:
            grammar = await state.compiled(prepared.grammar)
            jobs = [replace(job, grammar=grammar.fork()) for job in jobs]
        if self._cache_salt is not None:
            jobs = [replace(job, cache_salt=self._cache_salt) for job in jobs]
        if self._is_kept and state.learning is not None:
            kind = state.learning.kind_of(prepared.prompt)
            jobs = [replace(job, learned_as=kind) for job in jobs]
        self._record.prompt = prepared.prompt if state.options.log_prompts else None
        for job in jobs:
            state.metrics.request_started(
                job.id, arrived=self._record.arrived, n=job.num_samples,
                max_tokens=job.asked.params.max_tokens,
            )  # fmt: skip
        channel = Channel(jobs, self.answer_id)
        state.worker.submit(channel)
        timeout.reschedule(deadline + _LAST_SECONDS)
        error = too_slow(state.options.request_timeout_seconds)
        timer = asyncio.get_running_loop().call_at(deadline, state.worker.cut, channel, error)
        try:
            if self.request.stream:
                await self._stream(channel, prepared, send)
            else:
                await self._whole(channel, prepared, send)
        finally:
            timer.cancel()
            self._record.results = prepared.writer.results
            self._record.prompt_tokens = sum(len(job.asked.ids) for job in jobs)
            self._record.output_tokens = prepared.writer.num_output
            state.worker.leave(channel)
        return channel.is_cut

    async def _whole(self, channel: Channel, prepared: Prepared, send: Send) -> None:
        writer = prepared.writer

        def push(event: Event) -> bool:
            if self._record.first_token_seconds is None:
                return False
            writer.note(event)
            return True

        channel.push = push
        while not channel.is_done:
            for event in await self._take(channel):
                writer.note(event)
        if writer.is_large:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self.state.pool, lambda: encoded(writer.whole()))
        else:
            body = encoded(writer.whole())
        await send_whole(send, body)

    async def _stream(self, channel: Channel, prepared: Prepared, send: Send) -> None:
        writer = prepared.writer
        events = named_events if writer.names_events else plain_events
        await begin_stream(send)
        self._writer = writer
        await send_part(send, events(writer.first_chunks()))

        def written(taken: list[Event]) -> bytes:
            chunks = []
            for event in taken:
                writer.note(event)
                chunks += writer.chunks(event)
            return events(chunks) if chunks else b""

        parts = PartWriter.of(self._scope)

        def push(event: Event) -> bool:
            if self._record.first_token_seconds is None or event.update.prompt_logprobs:
                return False
            if parts is None or not parts.is_ready:
                return False
            if part := written([event]):
                parts.write(part)
            return True

        channel.push = push

        loop = asyncio.get_running_loop()
        while not channel.is_done:
            taken = await self._take(channel)
            if any(event.update.prompt_logprobs for event in taken):  # of a long prompt, perhaps
                part = await loop.run_in_executor(self.state.pool, written, taken)
            else:
                part = written(taken)
            if part:
                await send_part(send, part)
        last = events(writer.last_chunks()) + (b"" if writer.names_events else DONE)
        await send_part(send, last, is_last=True)

    async def _take(self, channel: Channel) -> list[Event]:
        taken = await channel.take()
        record = self._record
        if record.first_token_seconds is None and any(event.update.token_ids for event in taken):
            record.first_token_seconds = time.perf_counter() - record.arrived
        return taken

    async def _refuse(self, send: Send, error: BaseException) -> None:
        refusal = refusal_of(error)
        self._record.error = refusal.message
        self.state.tally.count(refusal)
        if refusal.status == 500 and refusal is not error:
            _log.error("request %s failed", self.answer_id, exc_info=error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._send_error(send, refusal), _ERROR_SECONDS)

    async def _send_error(self, send: Send, refusal: Refusal) -> None:
        writer = self._writer
        if writer is None:
            await send_refusal(send, refusal, self._path)
            return
        error = [writer.error(refusal)]
        last = named_events(error) if writer.names_events else plain_events(error) + DONE
        await send_part(send, last, is_last=True)
