"""How long a start takes, by part: parts are functions that exist, and add up to the whole."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType

import gpu_start
import pytest

from headstart.calibrate.tiny import write_tiny

MODULES = (
    "data.prompt_reader", "engine.auto.profile", "engine.core", "engine.engine", "models.build",
    "models.loading", "models.stored",
)  # fmt: skip
GPU_MODULES = (
    "backends.cuda.device_rounds", "backends.cuda.libraries", "backends.cuda.warm_up",
)  # fmt: skip


def names_in(modules: tuple[str, ...]) -> set[str]:
    found = set[str]()
    for module in modules:
        for name, value in vars(import_module(f"headstart.{module}")).items():
            found.add(name)
            if inspect.isclass(value):
                found |= {f"{name}.{method}" for method in vars(value)}
    return found


def test_parts_are_named_by_functions_that_exist() -> None:
    pytest.importorskip("triton")
    assert gpu_start.PARTS.keys() <= names_in(MODULES + GPU_MODULES)


@pytest.mark.usefixtures("quick_processes")
def test_every_start_is_told_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_tiny("mimo", tmp_path / "tiny"), tmp_path / "starts.json"
    options = (
        f"{folder} --speculate auto --warm 1 --requests 2 --length 64 --device cpu --kernels off"
    )
    monkeypatch.setattr(sys, "argv", ["gpu_start.py", *options.split(), "--out", str(out)])
    gpu_start.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads(out.read_text())
    assert [start["finds_kernels"] for start in told["starts"]] == [False, True]
    for start in told["starts"]:
        assert sum(start["parts"].values()) == pytest.approx(start["seconds"])
        assert start["device"] == "CPU"
        assert {"imports", "rounds that the host drives, timed"} <= start["parts"].keys()


def test_a_start_that_fails_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_start.py", str(tmp_path), "--device", "cpu"])
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="K = 3 failed"):
        gpu_start.main()


def fill_trunk(inner: Callable[[], FrameType]) -> FrameType:
    return inner()


def build(inner: Callable[[], FrameType]) -> FrameType:
    return inner()


def test_the_innermost_part_counts() -> None:
    here = inspect.currentframe
    assert gpu_start.part_of(build(partial(fill_trunk, here))) == "weights"
    assert gpu_start.part_of(fill_trunk(partial(build, here))).startswith("memory")
    assert gpu_start.part_of(here()) == gpu_start.REST
