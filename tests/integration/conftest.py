"""Engines that several files of tests use; a file may have its own of the same name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_runs import soft, start
from server_runs import Server, running, served
from tiny_fixture import Tiny

from headstart.engine.engine import Engine


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=0)


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=3)


@pytest.fixture(scope="session")
def api_server(tiny: Tiny) -> Iterator[Server]:
    """A `headstart serve` process for all tests that only talk to it."""
    names = ("--served-model-name", "small", "--served-model-name", "other")
    limits = ("--max-body-bytes", "100000", "--max-grammar-seconds", "30")
    with running(served(tiny), "--speculate", "3", *names, *limits) as started:
        yield started
        assert started.end() == 0  # SIGTERM with nothing to finish


@pytest.fixture(scope="session")
def attacked(tiny: Tiny) -> Iterator[Server]:
    """Another one, with short answers and the usual limits, for those who mean it harm."""
    limits = ("--max-model-len", "512", "--request-timeout-seconds", "20", "--max-queue", "64")
    with running(served(tiny), "--speculate", "3", *limits) as started:
        yield started
        assert started.end() == 0
