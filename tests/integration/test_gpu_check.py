"""The script that holds a GPU's engine against the CPU's tries copies in every company."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from headstart.engine.engine import Engine


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    found = import_module("gpu_check")
    monkeypatch.setattr(found, "EACH", found.EACH[:3])
    monkeypatch.setattr(found, "Engine", partial(Engine, kernels="off"))
    yield found
    sys.modules.pop("gpu_check", None)


@pytest.mark.usefixtures("no_clock")
def test_copies_are_tried_beside_a_draft_vocabulary_and_without_a_head(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--device cpu --variants mimo --mixtures 0 --dtypes float32 --drafts"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words.split(), "vocab,context"])
    assert script.main() == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("0 failures on cpu")
    assert [line.split()[3:5] for line in lines] == [
        [f"K={drafts}", "same"] for drafts in ("vocab", "context")
    ]
    for line in lines:
        right, made = (int(word) for word in line.split("['")[1].split()[:3:2])
        assert 0 < right < made, line
