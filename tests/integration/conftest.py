"""Engines that several files of tests use; a file may have its own of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_runs import soft, start
from support.server_runs import Server, running, served
from support.server_threads import Running, serving, small_engine
from support.tiny_fixture import Tiny

from headstart.engine import core
from headstart.engine.auto.costs import NEVER_PAYS
from headstart.engine.engine import Engine


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=0)


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=3)


@pytest.fixture(scope="module")
def no_clock() -> Iterator[None]:
    """For engines whose rounds are chosen by the test: what rounds take here decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "profile_host_rounds", lambda *_, **__: (NEVER_PAYS, None))
        yield


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    """A checkpoint that a server can show."""
    return served(tiny)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return small_engine(folder)


@pytest.fixture
def server(engine: Engine) -> Iterator[Running]:
    """A server in this process, around that engine, which drains for half a second."""
    with serving(engine, drain_seconds=0.5) as started:
        yield started


@pytest.fixture(scope="session")
def api_server(tiny: Tiny, quick_python: str) -> Iterator[Server]:
    """A `headstart serve` process for all tests that only talk to it."""
    names = ("--served-model-name", "small", "--served-model-name", "other")
    limits = ("--max-body-bytes", "100000", "--max-grammar-seconds", "30")
    flags = ("--speculate", "3", *names, *limits)
    with running(served(tiny), *flags, python=quick_python) as started:
        yield started
        assert started.end() == 0  # SIGTERM with nothing to finish


@pytest.fixture(scope="session")
def attacked(tiny: Tiny, quick_python: str) -> Iterator[Server]:
    """Another one, with short answers and the usual limits, for attacks."""
    limits = ("--max-model-len", "512", "--request-timeout-seconds", "20", "--max-queue", "64")
    with running(served(tiny), "--speculate", "3", *limits, python=quick_python) as started:
        yield started
        assert started.end() == 0
