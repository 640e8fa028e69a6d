"""When a bar is shown: by the clock, not when something is done."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from headstart.cli import look, progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that are made, on a terminal that nobody sees."""
    made: list[Any] = []

    def bar_of(*columns: Any) -> Progress:
        made.append(Progress(*columns, console=Console(file=io.StringIO())))
        return made[-1]

    monkeypatch.setattr(look, "bar_of", bar_of)
    # Not the system's: pytest puts its own there between fixtures and tests.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=_Terminal()))
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    return made


def test_a_bar_is_there_before_the_first_item_is_done(bars: list[Any]) -> None:
    """Regression: nothing was shown while the first of several passes took minutes."""
    with progress.counted_progress("tokens", 10) as advance:
        for _ in range(1000):
            if bars[0].live.is_started:
                break
            time.sleep(0.01)
        assert bars[0].live.is_started and bars[0].tasks[0].completed == 0
        advance(4)
        assert bars[0].tasks[0].completed == 4
    assert not bars[0].live.is_started


def test_without_a_total_a_bar_waits_for_the_first_item(bars: list[Any]) -> None:
    with progress.counted_progress("turns", 0):
        pass
    with progress.counted_progress("turns", 0) as advance:
        assert not bars[1].live.is_started
        advance(1)
        assert bars[1].live.is_started
    assert not any(bar.live.is_started for bar in bars)
