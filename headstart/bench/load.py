"""Puts a load on a server and records what came back.

The load generator watches itself: a timer in the same event loop says how late it was, and a run
whose times may be its own rather than the server's is marked as invalid.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import Any

from headstart.bench.arrivals import LoadOptions, arrival_seconds
from headstart.bench.client import Answer, Client
from headstart.bench.lag import LagMeter, lag_limit_seconds
from headstart.bench.metrics_scrape import Counters, speculation_between, went_back
from headstart.bench.records import TOKEN_COUNTS, RequestRecord, RunRecord, Speculation
from headstart.bench.response_counters import total_speculation
from headstart.bench.workload import Question
from headstart.errors import ServerError

_BUSY_SECONDS, _LONGEST_BUSY_SECONDS = 0.5, 30.0
_NOTED_CACHED = 0.01  # share of prompt tokens


@dataclass(frozen=True)
class Progress:
    """Reported after every request, inside the event loop: the callback must be quick."""

    num_requests: int
    num_done: int
    num_failed: int
    output_chunks: int
    seconds: float


class Load:
    """One run on one client; what is known of it while it goes on."""

    def __init__(
        self, client: Client, options: LoadOptions, seed: int, watch: Callable[[Progress], None]
    ):
        self._client, self._options, self._seed, self._watch = client, options, seed, watch
        self._questions, self._total = client.workload.questions, client.workload.num_requests
        # Encoded before the clock runs: a long prompt takes longer than the gap between chunks.
        self._bodies = {q.id: client.bodies.body(q) for q in self._questions}
        self.answers: list[Answer] = []
        self._num_failed = self._num_chunks = 0
        self.origin = 0.0

    async def drive(self) -> None:
        self.origin = time.perf_counter()
        if self._options.is_open:
            await self._open_loop()
        else:
            await self._closed_loop()

    async def _closed_loop(self) -> None:
        waiting = iter(self._questions)

        async def stream() -> None:
            for question in waiting:  # shared: each stream takes the next one
                if self._is_over():
                    return
                last = await self._converse(question, due=None)
                if last.failure is not None and last.failure.kind == "busy":
                    pause = last.failure.retry_after_seconds
                    pause = _BUSY_SECONDS if pause is None else pause
                    await asyncio.sleep(min(pause, _LONGEST_BUSY_SECONDS))

        count = min(self._options.num_streams or 1, len(self._questions))
        await _all([stream() for _ in range(count)])

    async def _open_loop(self) -> None:
        moments = arrival_seconds(self._options, len(self._questions), self._seed)
        limit = asyncio.Semaphore(self._options.num_streams or len(self._questions))

        async def arrive(question: Question, due: float) -> None:
            await asyncio.sleep(due - time.perf_counter())
            async with limit:
                if not self._is_over():
                    await self._converse(question, due=due)

        await _all(
            arrive(question, self.origin + moment)
            for question, moment in zip(self._questions, moments, strict=True)
        )

    async def _converse(self, question: Question, due: float | None) -> Answer:
        """All turns, or up to the first that fails: what comes after it cannot be asked."""
        texts: tuple[str, ...] = ()
        while True:
            body = self._bodies.pop(question.id, None)
            answer = await self._client.ask(question, texts, due=due, body=body)
            self._note(answer)
            texts, due = (*texts, answer.reader.content), None
            if answer.failure is not None or len(texts) == question.num_turns:
                return answer

    def _note(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._num_failed += answer.failure is not None
        self._num_chunks += answer.reader.num_chunks
        seconds, number = time.perf_counter() - self.origin, len(self.answers)
        self._watch(Progress(self._total, number, self._num_failed, self._num_chunks, seconds))

    def _is_over(self) -> bool:
        limit = self._options.time_limit_seconds
        return limit is not None and time.perf_counter() - self.origin > limit


async def drive(
    client: Client,
    options: LoadOptions,
    *,
    variant: str,
    repeat: int = 0,
    seed: int = 0,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> RunRecord:
    """Warm up, load, read the counters; the client must be prepared."""
    num_warm_up = await _warm_up(client, options)
    load = Load(client, options, seed, watch)
    before = await client.counters()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with _no_collection():
        async with LagMeter() as meter:
            await load.drive()
    after = await client.counters()
    sent = sorted(load.answers, key=lambda answer: answer.sent)
    origin = sent[0].sent if sent else load.origin
    records = tuple(answer.record(origin, client.count_tokens) for answer in sent)
    notes = [*client.workload.notes, *client.notes, *_notes(client, records)]
    return RunRecord(
        variant=variant,
        repeat=repeat,
        concurrency=options.num_streams,
        rate=options.rate,
        started_at=started_at,
        duration_seconds=max((record.end_seconds for record in records), default=0.0),
        requests=records,
        num_warm_up=num_warm_up,
        lag=meter.lag(limit_seconds=lag_limit_seconds(records)),
        speculation=_speculation(before, after, records, notes),
        notes=tuple(notes),
    )


async def _warm_up(client: Client, options: LoadOptions) -> int:
    """As many at once as the load will have, so that connections and batches of that size exist."""
    streams = options.num_streams or 1
    number = streams if options.warm_up is None else options.warm_up
    waiting = islice(cycle(client.workload.warm_up), number)
    failed: list[Answer] = []

    async def stream() -> None:
        for question in waiting:
            answer = await client.ask(question)
            if answer.failure is not None:
                failed.append(answer)

    await _all([stream() for _ in range(min(streams, number))])
    if number and len(failed) == number:
        failure = failed[0].failure
        assert failure is not None
        raise ServerError(
            f"{client.target.url} answered none of {number} warm-up requests ({failure.kind}: "
            f"{failure.words}). Nothing can be measured; see the server's log."
        )
    return number


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to the end; when one is interrupted, so are the others."""
    async with asyncio.TaskGroup() as group:
        for part in work:
            group.create_task(part)
            await asyncio.sleep(0)  # answers to the first are read while others are being sent


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's collector of cycles, which stops everything for as long as it likes."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _speculation(
    before: Counters | None, after: Counters | None, records: tuple[RequestRecord, ...],
    notes: list[str],
) -> Speculation | None:  # fmt: skip
    """From /metrics, where it is known what belongs to this run; of the responses where those
    say more about depths, or are all there is."""
    scraped = None
    if before is not None and after is not None:
        if went_back(before, after):
            notes.append("the server's counters went back: it was started again during the run")
        else:
            scraped = speculation_between(before, after)
    told = total_speculation(record.speculation for record in records if record.is_answered)
    found = [counters for counters in (scraped, told) if counters is not None]
    if not found:
        notes.append("the server gives no speculation counters, in /metrics or in its answers")
    return max(found, key=lambda counters: counters.num_rates, default=None)


def _notes(client: Client, records: tuple[RequestRecord, ...]) -> list[str]:
    notes = []
    exact = ("token_ids", "usage", "origins", "none")
    for counted_by in sorted({r.counted_by for r in records} - set(exact)):
        number = sum(record.counted_by == counted_by for record in records)
        notes.append(f"tokens of {number} answers: {TOKEN_COUNTS[counted_by]}")
    prompt = sum(record.prompt_tokens or 0 for record in records)
    cached = sum(record.cached_tokens or 0 for record in records)
    if cached > _NOTED_CACHED * prompt:
        notes.append(
            f"{cached / prompt:.0%} of the prompt tokens came from the server's prefix cache: TTFT "
            "is that of prompts it knew"
        )
    missing = client.workload.num_requests - len(records)
    if missing:
        notes.append(
            f"{missing} of {client.workload.num_requests} requests were not sent: the time limit "
            "was reached, or an earlier turn failed"
        )
    return notes
