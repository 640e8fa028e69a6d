"""Which kernels a device spends its time on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def kernel_events(run: Callable[[], object]) -> list[Any]:
    """The profiler's sums by kernel while `run` ran, most time on the device first."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
    return sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)


def list_kernels(run: Callable[[], object], most: int = 14) -> None:
    """Print milliseconds of the device by kernel while `run` runs."""
    for event in kernel_events(run)[:most]:
        total = event.self_device_time_total / 1e3
        print(f"  {total:8.2f} ms {event.count:6d} x  {event.key[:70]}", flush=True)
