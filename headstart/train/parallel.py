"""The processes of a run: one alone, or those that torchrun started.

Losses are divided by counts of the whole step, so gradients are summed over processes, never
averaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from headstart.errors import ConfigError, HeadstartError

_PATIENCE = timedelta(days=1)  # the others wait while one process fills a cache of states
_FAREWELL_SECONDS = 3.0  # for news of a process that leaves with an error


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
        """Over all processes. Parameters that none of them trains stay without a gradient, and so
        untouched: gradients of zero would let the optimiser decay them."""
        if self.size == 1:
            return
        every = list(parameters)
        flags = [float(parameter.grad is not None) for parameter in every]
        is_trained = self.sum_(torch.tensor(flags, device=every[0].device)).tolist()
        for parameter, trained in zip(every, is_trained, strict=True):
            if trained:
                if parameter.grad is None:  # this process had no rows in the step
                    parameter.grad = torch.zeros_like(parameter)
                self.sum_(parameter.grad)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says so; all hear the same."""
        if self.size == 1:
            return flag
        return bool(self.sum_(torch.tensor(float(flag), device=device)) > 0)

    def gather(self, part: Any) -> list[Any]:
        """The parts of all processes, in order of rank, on every process."""
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
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    dist.init_process_group(
        backend, store=PrefixStore("run", store), rank=rank, world_size=size, timeout=_PATIENCE
    )
    _meet(PrefixStore("meeting", store), rank, size)
    leaving = _Leaving(PrefixStore("leaving", store), rank, size)
    try:
        yield World(rank, size), device
    except (HeadstartError, OSError):
        leaving.tell()
        if rank != 0 and leaving.hears_of([0]):
            raise SystemExit(1) from None  # the first process says it for all
        raise
    except RuntimeError:
        # Most likely another process left a collective; that one has printed why.
        if leaving.hears_of([other for other in range(size) if other != rank]):
            leaving.tell()
            raise SystemExit(1) from None
        raise
    finally:
        dist.destroy_process_group()  # the others' collectives end here
        leaving.wait_for_others()


def _meet(store: Store, rank: int, size: int) -> None:
    """Wait for all processes to connect: one that fails at once would break the others' start."""
    store.set(str(rank), "connected")
    store.wait([str(other) for other in range(size)], _PATIENCE)


class _Leaving:
    """Processes that end with an error tell the others, so that one message is printed."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._has_told = False

    def tell(self) -> None:
        self._has_told = True
        with suppress(RuntimeError):
            self._store.set(str(self._rank), "error")

    def hears_of(self, ranks: Sequence[int]) -> bool:
        """Whether one of them has left, or does so soon."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < end:
            try:
                if any(self._store.check([str(rank)]) for rank in ranks):
                    return True
            except RuntimeError:  # the process that kept the store is gone
                return True
            time.sleep(0.05)
        return False

    def wait_for_others(self) -> None:
        """After an error, before this process ends: torchrun would end the others at once."""
        if self._has_told and self._rank == 0:
            for rank in range(1, self._size):
                self.hears_of([rank])
