"""Tests pass in the background of a shell, too, where SIGINT is ignored by all that is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ASK = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
START = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}])"


def started(code: str) -> str:
    """What a process says that a process with SIGINT ignored has started."""
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(TESTS)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return result.stdout.strip()


def test_what_tests_start_can_be_interrupted_although_the_shell_ignores_it() -> None:
    assert started(START) == "False", "the control: it is inherited"
    assert started(f"import support.environment; {START}") == "True"
