"""What a run reports while it goes on, and how it is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Watch:
    """Shows nothing and never stops a run; the command line has one with a progress bar."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def started(self, step: int, num_steps: int) -> None:
        """Steps done already, and in all."""

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After each step, with the first head's line of metrics."""

    def validated(self, name: str, step: int, metrics: Mapping[str, Any]) -> None:
        """After each validation of each head."""

    def heeds_stops(self) -> None:
        """From now on `is_stopped` is asked for; before, only an exception ends anything."""

    def is_stopped(self) -> bool:
        """Whether to save and leave after this step."""
        return False
