"""Seconds of launches on a GPU, from replays of a captured graph: no time of the host is in them.

Without a GPU the same calls run once, and their wall time says only that they run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
L2_BYTES = 120 << 20  # more than any cache holds
_UNCOUNTED, _REPLAYS = 3, 7
_LEAST_LAUNCHES = 16

Copy = TypeVar("Copy")


def seconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Of one run, the median over replays of a graph that holds all of them."""
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        for run in runs:
            run()
        return (time.perf_counter() - began) / len(runs)
    for run in runs[:2]:  # compiled before they are captured
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return timed(graph.replay) / len(runs)


def timed(run: Callable[[], Any], repeats: int = _REPLAYS) -> float:
    """Median seconds of a call, by the device's events; the first ones do not count."""
    for _ in range(_UNCOUNTED):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3)
    return statistics.median(times)


def wall(run: Callable[[], Any]) -> float:
    """Seconds of one call until the device is done, the host's time included."""
    started = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def seconds_over(run: Callable[[Copy], Any], copies: Sequence[Copy]) -> float:
    """Of one run, which gets one copy after another: together they are more than a cache holds."""
    rounds = max(1, _LEAST_LAUNCHES // len(copies))
    return seconds([partial(run, copy) for copy in copies] * rounds)


def copy_speed() -> float:
    """Bytes per second that a large copy reads and writes."""
    is_gpu = DEVICE.type == "cuda"
    source = torch.empty(1 << 30 if is_gpu else 1 << 20, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    # Not in a graph, where a copy of this kind reached 2.7 TB/s on an H200 that copies 4.2.
    return 2 * source.numel() / (timed(copy) if is_gpu else seconds([copy]))


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
