"""Watching a server that `launch --run` starts, until its first requests have told enough.

The engine takes the place of the launching process, so that signals and exit code are its own. What
watches it is a process beside it, `headstart doctor URL MODEL --while PID`, which ends with it.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.bench.metrics_scrape import EMPTY
from headstart.doctor.observing import Observation, RunningServer, observed
from headstart.doctor.verdict import FEWEST_ROUNDS
from headstart.errors import ServerError
from headstart.processes import python_command

_SECONDS = 2.0  # between two looks
_ENOUGH_ROUNDS = 200
_LONGEST_SECONDS = 600.0  # from the first rounds on: a server that is hardly asked is judged, too


@dataclass(frozen=True)
class Watched:
    """Processes are told by a file descriptor, which no later process with that number opens."""

    pid: int
    seconds: float = _SECONDS

    def looks(self, server: RunningServer, num_drafts: int | None) -> Observation | None:
        """What the first rounds come to; None if the process ended before there were enough."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        try:
            return self._until_enough(process, server, num_drafts)
        finally:
            os.close(process)

    def _until_enough(
        self, process: int, server: RunningServer, num_drafts: int | None
    ) -> Observation | None:
        judged_at = None
        while not select.select([process], [], [], self.seconds)[0]:
            try:
                counters = server.counters()
                if counters is None and not server.is_up():
                    continue
            except ServerError:
                continue  # it loads, or is gone, which the process tells
            found = observed(server, EMPTY, counters, [], num_drafts)
            if counters is None or found.is_off:
                return found
            rounds = found.evidence.rounds if found.evidence else 0
            if rounds >= _ENOUGH_ROUNDS:
                return found
            if rounds >= FEWEST_ROUNDS:
                judged_at = judged_at or time.monotonic() + _LONGEST_SECONDS
                if time.monotonic() >= judged_at:
                    return found
        return None


def start_beside(words: Sequence[str]) -> None:
    """Start `headstart WORDS --while PID` beside this process, as no child of what it becomes.

    An engine that was given a child would have to wait for it, and may count its children.
    """
    command = python_command("headstart", *words, "--while", str(os.getpid()))
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # a key that ends the engine is not for it; it sees the engine end
            if os.fork() == 0:
                os.dup2(2, 1)
                os.execv(command[0], command)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
