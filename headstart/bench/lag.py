"""How late the event loop is: what the load generator adds to the times it takes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable
from types import TracebackType

from headstart.bench.measures import chunk_gaps_seconds, quantile
from headstart.bench.records import Lag, RequestRecord

_PERIOD_SECONDS = 0.005
_LEAST_LIMIT_SECONDS = 0.005
_SHARE_OF_GAP = 0.2


class LagMeter:
    """A timer among the streams: each of its wake-ups waits as long as a chunk would."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._cpu = self._wall = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMeter:
        self._cpu, self._wall = time.thread_time(), time.perf_counter()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._cpu = time.thread_time() - self._cpu
        self._wall = time.perf_counter() - self._wall

    async def _watch(self) -> None:
        while True:
            asleep = time.perf_counter()
            await asyncio.sleep(_PERIOD_SECONDS)
            late = max(0.0, time.perf_counter() - asleep - _PERIOD_SECONDS)
            self._late.append(late)
            # A chunk that comes in the middle of a long stop waits for the rest of it: the timers
            # that the stop swallowed count as well, or one stop would be one in many.
            while (late := late - _PERIOD_SECONDS) > 0:
                self._late.append(late)

    def lag(self, *, limit_seconds: float) -> Lag:
        late = sorted(self._late) or [0.0]
        return Lag(
            median_seconds=quantile(late, 0.5),
            p99_seconds=quantile(late, 0.99),
            max_seconds=late[-1],
            limit_seconds=limit_seconds,
            busy_share=self._cpu / self._wall if self._wall else 0.0,
        )


def lag_limit_seconds(records: Iterable[RequestRecord]) -> float:
    """A fifth of the usual gap between chunks, and not less than what a busy machine does to any
    process now and then: means are not touched by that."""
    gaps = [gap for record in records for gap in chunk_gaps_seconds(record)]
    usual = statistics.median(gaps) if gaps else 0.0
    return max(_LEAST_LIMIT_SECONDS, _SHARE_OF_GAP * usual)
