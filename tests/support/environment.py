"""The process of a test, set up as soon as this is imported: before torch and Triton are.

conftest.py imports it first. `pytest_configure` would be too late where pytest is given a folder
whose own conftest.py imports torch.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 8 << 30


def _has_room(folder: Path) -> bool:
    """Whether temporary files fit there and into memory, several times over."""
    facts = Path("/proc/meminfo")
    if not os.access(folder, os.W_OK) or not facts.exists():
        return False
    room = os.statvfs(folder)
    found = re.search(r"MemAvailable: +(\d+)", facts.read_text())
    memory = int(found[1]) * 1024 if found else 0
    return min(room.f_bavail * room.f_frsize, memory) > _ROOM_BYTES


os.environ["RUST_BACKTRACE"] = "0"  # one of a panic in a library takes a second
# One thread per test process: several workers share few cores, and threads that spin while they
# wait for each other cost an order of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start would each compile the whole package again, and every run all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What is imported and collected stays; looking through it for garbage takes a third of that time.
gc.disable()  # until all is collected: conftest.py
# Without a GPU, kernels run in Triton's interpreter, which is chosen before its import.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# In the background of a shell we would ignore Ctrl-C, and so would all that we start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if _has_room(_MEMORY):  # gigabytes are written, and hardly any of it at a time
    os.environ.setdefault("TMPDIR", str(_MEMORY))
    tempfile.tempdir = None  # looked up again
