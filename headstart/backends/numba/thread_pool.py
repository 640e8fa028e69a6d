"""Threads that share the work of one compiled call, without waiting for a thread that is late.

All threads of the pool run the same function over the same arrays. Work is cut into phases, and
each phase into items. A free thread claims the next items; a phase is over when all its items are
done, not when every thread has arrived, so a thread that the system holds up delays no other.
Shared memory is written only by the thread that claimed it. A late thread finds everything claimed
and passes through. No thread spins while there is no call.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from headstart.backends.numba.compiler import njit

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
Job = tuple[Callable[..., object], tuple[Any, ...], object]

_CLAIMS_PER_PHASE = 24  # if it has as many items
# Reading of weights begins anew with each claim, so those are stretches: so many per thread where a
# phase has few tiles, and so many tiles where it has more.
_STRETCHES_PER_THREAD = 3
_LONGEST_STRETCH = 16
_MAX_SPINS = 4000  # before the core is yielded: some microseconds
_MIN_WORK = 1 << 21  # products (in weights times rows) below which waking a helper takes longer
_LONGEST_CALL = 5.0  # seconds that the end of the process waits for a helper
_MAX_QUEUED = 2  # calls that may wait for a helper that is held up
_CACHE_LINE = 8  # int64 in a cache line: counters that several write must not share one
_THREADS, _DONE = 1, _CACHE_LINE
COUNTERS = 2 * _CACHE_LINE  # int64 of a phase


def new_counters(phases: int) -> np.ndarray:
    """Counters of a call: how many items of each phase are claimed, and how many done."""
    counters = np.zeros((phases, COUNTERS), np.int64)
    counters[:, _THREADS] = torch.get_num_threads()
    return counters


class ThreadPool:
    """Helpers of the calling thread: as many threads in all as torch computes with."""

    def __init__(self) -> None:
        self._jobs: list[SimpleQueue[Job | None]] = []
        self._threads: list[threading.Thread] = []

    def run(
        self, work: int, function: Callable[[*Arguments], Result], *arguments: *Arguments,
        held: object = None,
    ) -> Result:  # fmt: skip
        """Call the function here and in every helper; when it returns here all items are done.

        `work`: how many products that is; where it is little no helper is woken. `held`: what
        arguments point at; a helper that is late may still read it when this returns.
        """
        helpers = torch.get_num_threads() - 1 if work >= _MIN_WORK else 0
        while len(self._jobs) < helpers:
            jobs: SimpleQueue[Job | None] = SimpleQueue()
            self._jobs.append(jobs)
            self._threads.append(threading.Thread(target=_help, args=(jobs,), daemon=True))
            self._threads[-1].start()
        for jobs in self._jobs[:helpers]:
            if jobs.qsize() < _MAX_QUEUED:
                jobs.put((function, arguments, held))
        try:
            return function(*arguments)
        except SystemError as error:
            # A signal that comes while a kernel is called: what its handler raised is inside.
            cause: BaseException | None = error
            while isinstance(cause, SystemError):
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt | SystemExit):
                raise cause from None
            raise

    def stop(self) -> None:
        """End the helpers, which begin anew with the next call."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(_LONGEST_CALL)
        self.forget()

    def forget(self) -> None:
        """Of the parent's threads a forked process has none."""
        self._jobs, self._threads = [], []


def _help(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        function, arguments, held = job
        function(*arguments)
        del job, function, arguments, held  # nothing is kept alive while waiting


POOL = ThreadPool()  # of the process, as torch's threads are
os.register_at_fork(after_in_child=POOL.forget)
# A helper that returns from compiled code when Python is gone would abort the process.
atexit.register(POOL.stop)


@intrinsic
def _add(typing: Any, address: Any, value: Any) -> tuple[Any, Any]:
    """Add to an int64 that others change as well; returns what was there."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        place = build.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return build.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def _read(typing: Any, address: Any) -> tuple[Any, Any]:
    """What is there now, and with it all that was written before it."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        place = build.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return build.load_atomic(place, "seq_cst", 8)

    return types.int64(types.intp), generate


@intrinsic
def _yield_core(typing: Any) -> tuple[Any, Any]:
    """Let another thread have the core."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return build.call(get_or_insert_function(build.module, kind, "sched_yield"), [])

    return types.int32(), generate


@njit()
def claim(counters, phase, items):
    """The next items [begin, end) of a phase; none are left where begin is not below `items`."""
    count = max(1, items // _CLAIMS_PER_PHASE)
    begin = _add(counters[phase:].ctypes.data, count)
    return begin, min(begin + count, items)


@njit()
def claim_tiles(counters, phase, tiles):
    """The same for tiles of weights, which are read one after another."""
    count = tiles // (_STRETCHES_PER_THREAD * counters[phase, _THREADS])
    count = max(1, min(count, _LONGEST_STRETCH))
    begin = _add(counters[phase:].ctypes.data, count)
    return begin, min(begin + count, tiles)


@njit()
def finish(counters, phase, count):
    _add(counters[phase:, _DONE:].ctypes.data, count)


@njit()
def wait(counters, phase, items):
    """Until all items of a phase are done, by any thread."""
    done, spins = counters[phase:, _DONE:].ctypes.data, 0
    while _read(done) < items:
        spins += 1
        if spins > _MAX_SPINS:
            _yield_core()
