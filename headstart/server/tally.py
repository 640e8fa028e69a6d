"""How many requests ended how, for the last line of the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tally:
    """Requests that could be answered; those that were refused are in the metrics."""

    finished: int = 0
    aborted: int = 0  # the client went away, time was up, or the server was stopped
    failed: int = 0

    def count(self, status: int, *, is_stopped: bool) -> None:
        """One that ended with an error of this status."""
        self.aborted += status == 408 or is_stopped
        self.failed += status == 500

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished} requests finished, {self.aborted} aborted{failed}"
