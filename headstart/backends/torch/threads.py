"""How many threads compute: measured, because a spinning thread on a busy core costs far more
than it brings, and a small model may be faster on fewer cores than there are.

The number is a setting of the whole process (`torch.set_num_threads`). It is left alone where it
was chosen already: by environment, or in this process.
"""

from __future__ import annotations

import os
import time

import torch

from headstart.backends.host import usable_cores
from headstart.backends.torch.tuning import tune
from headstart.models.build import LoadedModel
from headstart.models.documents import Documents, Passage
from headstart.models.trunk import Trunk

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_AT_IMPORT = torch.get_num_threads()
_ROWS = 4  # as in a round that verifies three drafts
_REPEATS = 5
_LONG_SECONDS = 1.0  # a pass this long is measured once
_CLEARLY = 0.95  # fewer threads win a tie: they leave cores to others


def use_all_cores() -> list[str]:
    """For kernels whose threads do not wait for one that is held up; a note about it."""
    if not _may_choose():
        return []
    cores = usable_cores()
    torch.set_num_threads(cores)
    return [f"threads: {cores}, all cores that may be used"] if cores > 1 else []


def measure_threads(trunk: Trunk, *, is_tuned: bool) -> list[str]:
    """Take the fastest number of threads for a pass of this trunk; a note about it.

    A trunk that will be tuned is tuned for every number: the library's own products may not gain
    at all.
    """
    if not _may_choose():
        return []
    cores = usable_cores()
    if cores == 1:
        torch.set_num_threads(1)
        return []
    seconds: dict[int, float] = {}
    best = 1
    for threads in sorted({1, *(cores >> shift for shift in range(3)), cores} - {0}):
        torch.set_num_threads(threads)
        if is_tuned:
            tune(trunk, measured=[_ROWS])
        seconds[threads] = pass_seconds(trunk)
        if seconds[threads] < seconds[best] * _CLEARLY:
            best = threads
    torch.set_num_threads(best)
    measured = ", ".join(f"{count}: {time * 1e3:.1f} ms" for count, time in seconds.items())
    return [f"threads: {best}, the fastest for a pass of {_ROWS} rows here ({measured})"]


def prepare(model: LoadedModel, *, chooses_threads: bool) -> list[str]:
    """Tune plain modules on a CPU for passes outside an engine; notes about it."""
    if model.device.type != "cpu":
        return []
    notes = measure_threads(model.trunk, is_tuned=True) if chooses_threads else []
    tune(*(module for module in (model.trunk, model.head) if module is not None))
    return notes


def _may_choose() -> bool:
    is_given = any(os.environ.get(name) for name in _VARIABLES)
    return not is_given and torch.get_num_threads() == _AT_IMPORT


@torch.inference_mode()
def pass_seconds(trunk: Trunk) -> float:
    """A trunk pass over a few rows, logits included: the median of some."""
    documents = Documents((_ROWS,))
    ids = torch.zeros(_ROWS, dtype=torch.long)
    positions = documents.positions(ids.device)
    times = []
    for repeat in range(_REPEATS + 1):
        started = time.perf_counter()
        contexts = [Passage(documents) for _ in trunk.layers]
        trunk.logits(trunk.final_norm(trunk(ids, positions, contexts)))
        times.append(time.perf_counter() - started)
        if times[-1] > _LONG_SECONDS and repeat:
            break
    return sorted(times[1:])[len(times[1:]) // 2]
