"""The command line inside the test process: a process of its own would import torch first.

Tests about processes (signals, kills, what is imported, exit at the end) start real ones.
"""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from headstart.cli.main import main

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOGGERS = (None, "headstart", "uvicorn", "uvicorn.access")


def headstart(
    *words: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`headstart WORDS`: its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, process_as_before():
        patch.setattr(sys, "argv", ["headstart", *words])
        for name, value in environment.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())


@contextmanager
def process_as_before() -> Iterator[None]:
    """Handlers of signals, loggers and torch's threads, which a command sets for its process."""
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    threads = torch.get_num_threads()
    try:
        with loggers_as_before():
            yield
    finally:
        torch.set_num_threads(threads)
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


@contextmanager
def loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(own, own.level, list(own.handlers), own.propagate) for own in loggers]
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for own, level, handlers, propagate in before:
            own.setLevel(level)
            own.handlers, own.propagate = handlers, propagate
