"""The process that learns beside a server: `python -m headstart.learn.process`, given JSON.

It says what happens in JSON lines on its standard output, and takes what the server decided from
its standard input; when that ends, the server is gone and so is this process. It writes heads with
what belongs to them, thinned texts, and states of the base; those of other bases it removes. The
server stops and continues it by signals, at any moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from headstart.documents import misfit, parse_json

_IDLE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_MOST_MMAP_THRESHOLD = 32 << 20  # bytes; older versions take no more


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a learner is started with."""

    folder: str
    model: str
    head: str | None  # the one that serves
    base: str | None
    device: str
    dtype: str
    max_bytes: int
    overrides: dict[str, Any]  # of the options of training
    vocab: str | None = None  # file of the draft vocabulary that is served
    renews_vocab: bool = True  # whether it is counted anew
    least_seconds: float = 60.0  # of training between two checks
    # Steps until the rate is reached: AdamW's first ones move every weight by the rate, whatever
    # the gradient says, and that costs what was known (docs/lab-log.md).
    warm_up: int = 100
    # Before it is ready: a server sizes its K/V by what is free then.
    makes_blank_step: bool = False
    fault: str | None = None  # of tests: see faults.py
    gives_way: bool = True  # False for tests, whose machine may be busy all the time

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Task:
        found = parse_json(text)
        assert isinstance(found, dict) and misfit(cls, found) is None, found
        return cls(**found)


def main() -> int:
    _end_with_parent()
    # Of a whole group of processes it is the server's: it ends this one, and may answer until then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _keep_freed_memory()
    commands: SimpleQueue[dict[str, Any]] = SimpleQueue()
    task = Task.of(sys.stdin.readline())
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    try:
        _learn(task, commands)
    except Exception as error:
        tell("ended", {"reason": f"{type(error).__name__}: {error}"})
        raise
    return 0


def tell(name: str, facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"event": name, **facts}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _keep_freed_memory() -> None:
    """Do not return freed memory to the system: each step wants the same tensors of some 26 MB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl does not
    # Either ends glibc's own choice of both, so that the second alone would do harm.
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD):
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _give_way() -> None:
    """Let every other process go first. Not while loading: a server's start waits for that."""
    if not os.path.isdir("/proc/self/task"):
        os.nice(19)
        return
    with contextlib.suppress(OSError):  # where the kernel shares time by session, nice counts there
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # one that has ended; some containers forbid SCHED_IDLE
            os.setpriority(os.PRIO_PROCESS, thread, 19)
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _listen(commands: SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        commands.put(parse_json(line))
    os._exit(0)


def _learn(task: Task, commands: SimpleQueue[dict[str, Any]]) -> None:
    from headstart.learn.assembly import make_loop

    loop = make_loop(task, tell)
    tell("ready", loop.take_memory(blank_step=task.makes_blank_step))
    if task.gives_way:
        _give_way()
    while True:
        try:
            while True:
                _obey(loop, commands.get_nowait())
        except Empty:
            pass
        if not loop.turn():
            time.sleep(_IDLE_SECONDS)


def _obey(loop: Any, command: dict[str, Any]) -> None:
    if command["command"] == "serves":
        loop.served(Path(command["head"]))
    else:
        assert command["command"] == "refused", command
        loop.refused()


if __name__ == "__main__":
    sys.exit(main())
