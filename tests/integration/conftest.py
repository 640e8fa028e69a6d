"""Engines that several files of tests use; a file may have its own of the same name."""

from __future__ import annotations

import pytest
from engine_runs import soft, start
from tiny_fixture import Tiny

from headstart.engine.engine import Engine


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=0)


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=3)
