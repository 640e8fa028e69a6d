"""Several processes on one GPU: small models leave it idle while Python prepares the next step."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Recipe(Protocol):
    """What every stage needs of the settings of a recipe."""

    @property
    def work(self) -> Path: ...
    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def processes(self) -> int: ...


def side_by_side(
    do: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Iterator[Result]:
    """`do` of every item, as they get ready; one process does it here, in order."""
    if processes == 1:
        yield from map(do, items)
        return
    spawned = multiprocessing.get_context("spawn")
    # They share the processor. A process that dies raises BrokenProcessPool here.
    with ProcessPoolExecutor(processes, spawned, torch.set_num_threads, (2,)) as pool:
        for done in as_completed([pool.submit(do, item) for item in items]):
            yield done.result()
