"""How many threads compute: measured, because a spinning thread on a busy core costs far more
than it brings, and a small model may be faster on fewer cores than there are.

The number is a setting of the whole process (`torch.set_num_threads`).
"""

from __future__ import annotations

import os
import time

import torch

from headstart.assembly.host import usable_cores
from headstart.models.documents import Documents, Passage
from headstart.models.trunk import Trunk
from headstart.models.tuning import tune

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_AT_IMPORT = torch.get_num_threads()
_ROWS = 4  # as in a round that verifies three drafts
_REPEATS = 5
_LONG_SECONDS = 1.0  # a pass this long is measured once
_CLEARLY = 0.95  # fewer threads win a tie: they leave cores to others


def set_threads(trunk: Trunk, *, is_tuned: bool = True, is_compiled: bool = False) -> str | None:
    """Take the fastest number of threads for a pass of this trunk; returns a note about it.

    Nothing is changed where somebody chose already: by environment, or in this process. A trunk
    that will be tuned is tuned for every number: the library's own products may not gain at all.
    Compiled kernels get all cores: their threads do not wait for one that is held up.
    """
    if any(os.environ.get(name) for name in _VARIABLES) or torch.get_num_threads() != _AT_IMPORT:
        return None
    cores = usable_cores()
    if cores == 1:
        torch.set_num_threads(1)
        return None
    if is_compiled:
        torch.set_num_threads(cores)
        return f"threads: {cores}, all cores that may be used"
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
    told = ", ".join(f"{count}: {time * 1e3:.1f} ms" for count, time in seconds.items())
    return f"threads: {best}, the fastest for a pass of {_ROWS} rows here ({told})"


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
