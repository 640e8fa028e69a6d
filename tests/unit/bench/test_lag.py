"""The load generator notices that it was late."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.bench_records import request

from headstart.bench.lag import LagMeter, lag_limit_seconds
from headstart.bench.records import Lag


def test_one_long_stop_counts_for_all_that_waited_in_it() -> None:
    """As one late timer among hundreds it would be no part of a p99."""

    async def main() -> Lag:
        async with LagMeter() as meter:
            await asyncio.sleep(0.5)
            time.sleep(0.2)
            await asyncio.sleep(0.3)
        return meter.lag(limit_seconds=0.1)

    lag = asyncio.run(main())
    assert lag.is_large and lag.p99_seconds > 0.1 and lag.max_seconds >= 0.19
    assert lag.median_seconds < 0.1


def test_the_limit_follows_the_gaps_between_chunks() -> None:
    slow = request([(0.1 * i, 1) for i in range(10)])
    assert lag_limit_seconds([slow]) == pytest.approx(0.02)
    quick = request([(0.001 * i, 1) for i in range(10)])
    assert lag_limit_seconds([quick]) == lag_limit_seconds([]) == 0.005
