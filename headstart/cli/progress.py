"""Progress on stderr: a bar for anything longer than two seconds, silence when not a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_QUIET_SECONDS = 2.0


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes just done."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with _shown(title, total, columns) as advance:
        yield advance


@contextmanager
def counted_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items just done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _shown(title, total, columns) as advance:
        yield advance


@contextmanager
def _shown(
    title: str, total: int, columns: tuple[ProgressColumn, ...]
) -> Iterator[Callable[[int], None]]:
    from headstart.cli.look import bar_of

    bar = bar_of(*columns)
    task = bar.add_task(title, total=total)
    # By a clock of its own: the first items may take minutes. Without a total there is nothing to
    # show before one is done.
    timer = threading.Timer(_QUIET_SECONDS, bar.start)
    timer.daemon = True
    if total:
        timer.start()
    started = time.monotonic()

    def advance(count: int) -> None:
        if not total and time.monotonic() - started > _QUIET_SECONDS:
            bar.start()
        bar.advance(task, count)

    try:
        yield advance
    finally:
        timer.cancel()
        if total:
            timer.join()  # it may be about to start the bar
        if bar.live.is_started:
            bar.stop()
