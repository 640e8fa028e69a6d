"""When a learner runs: always without requests, and a share of the time with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from headstart.cli.spinning import limit_spinning
from headstart.learn import child
from headstart.learn.child import Child, Pace
from headstart.learn.process import Task

TASK = Task(
    folder="", model="", head=None, base=None, device="cpu", dtype="auto", max_bytes=1, overrides={}
)  # fmt: skip


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


def test_beside_rounds_of_a_gpu_its_turns_are_short_and_its_share_is_kept() -> None:
    sent: list[int] = []
    pace = Pace(sent.append, 0.1, lambda: True, shares_gpu=True)
    pace.start()
    time.sleep(0.6)
    pace.close()
    assert sent.count(signal.SIGSTOP) > 10  # two with half-second periods
    assert pace.shared_seconds <= 0.11 * pace.busy_seconds + 0.02  # however late threads wake up


def test_who_waits_for_a_learner_finds_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: K/V could be sized before it was known what the learner takes later."""
    code = "import json, time; print(json.dumps({'event': 'ready'}), flush=True); time.sleep(30)"
    monkeypatch.setattr(child, "python_command", lambda module: [sys.executable, "-c", code])
    heard: list[str] = []

    def slowly(name: str, facts: object) -> None:
        time.sleep(0.1)
        heard.append(name)

    task = Task(
        folder="", model="", head=None, base=None, device="cpu", dtype="auto", max_bytes=1,
        overrides={},
    )  # fmt: skip
    started = Child(task, slowly)
    assert started.is_ready.wait(30) and heard == ["ready"]
    started.close()


@pytest.mark.parametrize("shares_gpu", [True, False])
def test_kernels_that_were_launched_end_before_the_process_goes_on(
    shares_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process would still have what it launched ahead run beside rounds."""
    code = "import json, os; print(json.dumps({'event': os.getenv('CUDA_LAUNCH_BLOCKING', 'no')}))"
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr(child, "python_command", lambda module: [sys.executable, "-c", code])
    heard: list[str] = []
    started = Child(TASK, lambda name, facts: heard.append(name), shares_gpu=shares_gpu)
    started.is_ready.wait(30)
    started.close()
    assert heard[0] == ("1" if shares_gpu else "no")


class Started(Exception):
    """Ends a start where a process would begin."""


@pytest.mark.parametrize("chosen", [None, "7"], ids=["not chosen", "chosen"])
def test_what_the_user_has_set_for_memory_and_spinning_counts(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def start(*_: object, env: dict[str, str], **__: object) -> None:
        given.update(env)
        raise Started

    user = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"} if chosen else {}
    user |= {"GOMP_SPINCOUNT": chosen} if chosen else {}
    user |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": chosen} if chosen else {}
    monkeypatch.setattr(os, "environ", dict(user))
    monkeypatch.setattr(subprocess, "Popen", start)
    limit_spinning()  # as `serve` does
    before = dict(os.environ)
    with pytest.raises(Started):
        Child(TASK, lambda name, facts: None)
    assert given["GOMP_SPINCOUNT"] == (chosen or "10000")
    expected = ["glibc.malloc.hugetlb=1", *filter(None, [user.get("GLIBC_TUNABLES")])]
    assert given["GLIBC_TUNABLES"].split(":") == expected, "glibc takes the last of two"
    assert given["OMP_WAIT_POLICY"] == "passive"
    assert given["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == (chosen or "64")
    assert os.environ == before
