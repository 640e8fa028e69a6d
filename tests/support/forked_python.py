"""Processes of tests without seconds of imports for each: forks of one process that has done them.

Each is a process of its own, with its own memory, files, signals and exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import SCRIPTS

_START_SECONDS = 180  # a limit for what hangs: importing torch takes a minute on a busy machine
_SOCKET = "HEADSTART_TEST_FORKS"


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """A program that runs modules and scripts as Python does.

    Signals are passed on. After SIGKILL, which cannot be, what it ran is gone a moment later, when
    its pipes are closed: `communicate` waits for that.
    """
    program, socket = folder / "python", folder / "socket"
    program.write_text(f"#!{sys.executable} -IS\n" + (SCRIPTS / "quick_python.py").read_text())
    program.chmod(0o755)
    words = [sys.executable, str(SCRIPTS / "forked_python.py"), str(socket), str(program)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_SOCKET, str(socket))
        with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
            started = time.monotonic()
            while not socket.exists():
                assert process.poll() is None and time.monotonic() - started < _START_SECONDS
                time.sleep(0.01)
            yield program
            assert process.stdin is not None
            process.stdin.close()


def working_pid(process: subprocess.Popen[Any]) -> int:
    """The process that does the work: another one where that program was started."""
    place = Path(os.environ.get(_SOCKET, "none")).parent
    if Path(process.args[0]).parent != place:
        return process.pid
    note, deadline = place / str(process.pid), time.monotonic() + 60
    while not (note.exists() and note.read_text()):  # on a busy machine the work may come first
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(note.read_text())
