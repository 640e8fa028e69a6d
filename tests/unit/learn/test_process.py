"""What the learner's process asks of the system at its start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.server_threads import wait_until

from headstart.learn import process
from headstart.processes import python_command


@pytest.mark.parametrize(("taken", "asked"), [(1, [-3, -1]), (0, [-3])], ids=["taken", "refused"])
def test_freed_memory_is_kept_only_where_large_blocks_are_memory_that_can_be_kept(
    taken: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc refuses thresholds that are too large for it; M_MMAP_THRESHOLD is -3."""
    calls: list[int] = []

    def mallopt(option: int, value: int) -> int:
        calls.append(option)
        return taken

    libc = SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: libc)
    process._keep_freed_memory()
    assert calls == asked


def state_of(pid: int) -> dict[str, str]:
    """What the system says of a process; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {} if found["State"].startswith(("Z", "X")) else found


def test_a_learner_that_is_stopped_ends_with_a_server_that_is_killed() -> None:
    """Its pipe says so, too, but nothing that is stopped reads. To SIGTERM it does not listen:
    systemd sends that to all processes of a server, which ends its learner itself."""
    code = (
        "import subprocess, sys, time\n"
        "learner = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(learner.pid, flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, *python_command("headstart.learn.process")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        ignores = 1 << (signal.SIGTERM - 1)  # the last thing that it asks for before it waits
        wait_until(lambda: bool(int(state_of(pid)["SigIgn"], 16) & ignores), 60)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid)["State"].startswith("T"), 60)
        server.kill()
    wait_until(lambda: not state_of(pid), 60)
