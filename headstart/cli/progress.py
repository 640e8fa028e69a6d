"""Progress on stderr: a bar for anything longer than two seconds, silence when not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_SECONDS = 2.0


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many bytes were just done."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=total)
    started = time.monotonic()
    is_shown = False

    def advance(num_bytes: int) -> None:
        nonlocal is_shown
        if not is_shown and time.monotonic() - started > _QUIET_SECONDS:
            bar.start()
            is_shown = True
        bar.advance(task, num_bytes)

    try:
        yield advance
    finally:
        if is_shown:
            bar.stop()
