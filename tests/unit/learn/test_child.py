"""When a learner runs: always without requests, and a share of the time with them."""

from __future__ import annotations

import signal
import time

from headstart.learn.child import Pace


def paced(share: float, *, busy: bool, seconds: float) -> tuple[float, Pace]:
    """The share of the time in which the process was let run."""
    ran, since = 0.0, time.monotonic()
    is_running = True

    def send(number: int) -> None:
        nonlocal ran, since, is_running
        now = time.monotonic()
        ran += now - since if is_running else 0.0
        since, is_running = now, number == signal.SIGCONT

    began = time.monotonic()
    pace = Pace(send, share, lambda: busy)
    pace.start()
    time.sleep(seconds)
    pace.close()
    send(signal.SIGSTOP)
    return ran / (time.monotonic() - began), pace


def test_while_requests_run_it_gets_its_share_at_most() -> None:
    ran, pace = paced(0.2, busy=True, seconds=1.3)
    assert ran < 0.5  # the machine may be slow to wake this thread; the counters are exact
    assert pace.shared_seconds <= 0.2 * (pace.busy_seconds + 0.5)


def test_without_requests_it_runs_and_a_share_of_nothing_is_nothing() -> None:
    assert paced(0.2, busy=False, seconds=0.2)[0] > 0.9
    assert paced(0.0, busy=True, seconds=0.4)[1].shared_seconds == 0
