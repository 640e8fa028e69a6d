"""The learner's process as the server has it: started, heard, told, stopped and continued."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from headstart.documents import parse_json
from headstart.learn.process import Task
from headstart.processes import SHORT_SPIN, python_command

_log = logging.getLogger("headstart.learn")
# In which learning gets its share, while requests run. Two processes on one GPU take turns: what a
# learner gets at once, some rounds wait for, so its turns there are shorter than a round.
_PERIOD_SECONDS, _GPU_PERIOD_SECONDS = 0.5, 0.01
# Threads of numeric libraries that spin for long would take cores that requests need; without any
# spinning each of the many short products of a step waits for a sleeping thread.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
_SPIN_TURNS = "10000"
# torch's products on CPUs keep what they prepared for each size. Steps have other sizes every time,
# and 1024 of these, which is what is kept otherwise, are gigabytes.
_KEPT_SIZES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
_LARGE_PAGES = "glibc.malloc.hugetlb=1"  # a step's tensors take some 190,000 pages of 4 KB
_LOOK_SECONDS = 0.02  # between two looks at whether requests run
_BUSY_SECONDS = 1.0  # after the last request, that the server still counts as busy
_MODULE = "headstart.learn.process"

Heard = Callable[[str, dict[str, Any]], None]


class Child:
    """One process; `heard` is called in a thread of its own with every event.

    shares_gpu: it learns on the GPU that serves.
    """

    def __init__(self, task: Task, heard: Heard, *, shares_gpu: bool = False):
        self._heard = heard
        self._process = subprocess.Popen(
            python_command(_MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=_environment(shares_gpu=shares_gpu), text=True, start_new_session=True,
        )  # fmt: skip
        self._write(task.as_json())
        self._is_closed = False
        self.is_ready = threading.Event()  # or has ended
        self._thread = threading.Thread(target=self._listen, name="learner", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def tell(self, command: str, **facts: Any) -> None:
        self._write(json.dumps({"command": command, **facts}))

    def send(self, number: int) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def close(self) -> None:
        self._is_closed = True
        self.send(signal.SIGKILL)  # a stopped process takes no other
        self._process.wait()
        self._thread.join(1.0)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = parse_json(line)
                name = event.pop("event")
            except (ValueError, AttributeError, KeyError):
                _log.warning("learning: the learner said %r", line[:200])
                continue
            try:
                self._heard(name, event)
            except Exception:
                _log.exception("learning: an event of the learner was lost")
            if name == "ready":  # its facts are there before it counts
                self.is_ready.set()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # half a line may wait in it
                if pipe is not None:
                    pipe.close()
        self.is_ready.set()
        if not self._is_closed:
            self._heard("gone", {"code": code})


def _environment(*, shares_gpu: bool) -> dict[str, str]:
    """Of a learner: what the user has set for memory and spinning counts."""
    environment = {**_KEPT_SIZES, **os.environ, **_ENVIRONMENT}
    # Of a setting that is there twice, glibc takes the last.
    tunables = [_LARGE_PAGES, environment.get("GLIBC_TUNABLES", "")]
    environment["GLIBC_TUNABLES"] = ":".join(filter(None, tunables))
    if environment.get("GOMP_SPINCOUNT", SHORT_SPIN) == SHORT_SPIN:
        environment["GOMP_SPINCOUNT"] = _SPIN_TURNS
    if shares_gpu:  # what was launched ahead would run on after the process is stopped
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    return environment


class Pace:
    """Lets a process run when the server is idle, and a share of the time when it is not."""

    def __init__(
        self, send: Callable[[int], None], share: float, is_busy: Callable[[], bool], *,
        shares_gpu: bool = False,
    ):  # fmt: skip
        self._send, self._share, self._is_busy = send, share, is_busy
        self._period = _GPU_PERIOD_SECONDS if shares_gpu else _PERIOD_SECONDS
        self._end = threading.Event()
        self._is_stopped = False
        self._last_busy = -_BUSY_SECONDS
        self.busy_seconds = self.shared_seconds = 0.0  # while requests ran: in all, and learning
        self._thread = threading.Thread(target=self._run, name="learn-pace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._end.is_set():
            if not self._busy():
                self._continue()
                self._end.wait(_LOOK_SECONDS)
                continue
            started = time.monotonic()
            run = self._share * self._period
            if run > 0:
                self._continue()
                self._end.wait(run)
                run = time.monotonic() - started  # a thread wakes up late
            # So much later its share of the time is not more than that.
            until = started + max(self._period, run / self._share if self._share else 0.0)
            if self._share < 1:
                self._stop()
                while self._busy() and (left := until - time.monotonic()) > 0:
                    if self._end.wait(min(left, _LOOK_SECONDS)):
                        break
            self.busy_seconds += time.monotonic() - started
            self.shared_seconds += run
        self._continue()

    def _busy(self) -> bool:
        now = time.monotonic()
        if self._is_busy():
            self._last_busy = now
        return now - self._last_busy < _BUSY_SECONDS

    def _stop(self) -> None:
        self._send(signal.SIGSTOP)  # every time: the process may be a new one
        self._is_stopped = True

    def _continue(self) -> None:
        if self._is_stopped:
            self._send(signal.SIGCONT)
            self._is_stopped = False
