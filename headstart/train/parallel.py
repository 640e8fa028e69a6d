"""The processes of a run: one alone, or those that torchrun started.

Losses are divided by counts of the whole step, so gradients are summed over processes, never
averaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headstart.errors import ConfigError

_PATIENCE = timedelta(days=1)  # the others wait while one process fills a cache of states


@dataclass(frozen=True)
class World:
    """This process among `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # this process had no rows in the step
                parameter.grad = torch.zeros_like(parameter)
            self.sum_(parameter.grad)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says so; all hear the same."""
        if self.size == 1:
            return flag
        return bool(self.sum_(torch.tensor(float(flag), device=device)) > 0)

    def gather(self, part: Any) -> list[Any]:
        """Everybody's part, in order of rank, on every process."""
        if self.size == 1:
            return [part]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part)
        return parts

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


def is_main_process() -> bool:
    """The same as `World.is_main`, for those outside of the run."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def joined(device: str) -> Iterator[tuple[World, str]]:
    """The processes that torchrun started, and this one's device; alone without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(), device
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r} for {size} processes; give cuda, one each.")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield World(dist.get_rank(), dist.get_world_size()), device
    finally:
        dist.destroy_process_group()
