"""Shared fixtures: tiny checkpoints of every family, made on the fly and kept for the session."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support.environment  # noqa: F401  sets this process up: before torch
from support.tiny_fixture import Tiny

from headstart.calibrate.tiny import write_tiny


def pytest_collection_finish() -> None:
    """What is there stays until the end: searching it for garbage took a fifth of all time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would report that their objects are still there
    gc.enable()


os.environ.pop("COLUMNS", None)  # a narrow terminal of the run would fold tables


@pytest.fixture(scope="session", autouse=True)
def _no_disk_waits() -> Iterator[None]:
    """Flushing to disk is real in subprocess tests; elsewhere it would only cost minutes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr(os, "fdatasync", lambda handle: None)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _products_are_timed_once() -> Iterator[None]:
    """Hundreds of engines start; which way a product is faster is measured once per shape."""
    from headstart.backends.torch import tuning

    measure, known = tuning._fastest, dict[Any, str]()

    def fastest(weights: list[Any], rows: int) -> str:
        key = (*weights[0].shape, rows)
        if key not in known:
            known[key] = measure(weights, rows)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_fastest", fastest)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny("mimo", dtype="F32")` gives the folder of that checkpoint, which is never changed."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(variant: str, **options: Any) -> Path:
        key = f"{variant}{sorted(options.items())}"
        if key not in made:
            made[key] = write_tiny(variant, folder / f"{variant}-{len(made)}", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def quick_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python whose processes have torch and the like imported when they begin."""
    from support.forked_python import forked_python

    with forked_python(tmp_path_factory.mktemp("python")) as program:
        yield str(program)


@pytest.fixture
def quick_processes(quick_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started by sys.executable are run by that Python."""
    monkeypatch.setattr(sys, "executable", quick_python)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """For tests in which a server sets up the logging of its process, and of ours."""
    from support.commands import loggers_as_before

    with loggers_as_before():
        yield


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """For single kernels: Triton's interpreter with all its checks, doing nothing twice."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from support.quick_interpreter import quicken

            quicken(patch)
        yield


@pytest.fixture(scope="module")
def quick_kernels() -> Iterator[None]:
    """For whole engines with interpreted kernels: the interpreter at its quickest."""
    patch = pytest.MonkeyPatch()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.quick_interpreter import quicken_engines

        quicken_engines(patch)
    yield
    patch.undo()
