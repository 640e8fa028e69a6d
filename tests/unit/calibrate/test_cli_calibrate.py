from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.cli.calibrate import run
from headstart.errors import ConfigError

SHAPE = "layers=1,hidden=64,intermediate=96,heads=4,kv_heads=2,vocab=32"


def test_a_dry_run_prints_sizes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(shape=SHAPE, acceptance=0.5, out=out, dry_run=True)
    said = capsys.readouterr()
    assert "GB" in said.out and "parameters" in said.out and "wrote" not in said.out
    assert "nothing was written" in said.err
    assert not out.exists()


def test_a_dry_run_needs_no_folder_and_counts_what_a_run_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shape=SHAPE, acceptance=0.5, dry_run=True, json_output=True)
    planned = json.loads(capsys.readouterr().out)
    run(shape=SHAPE, acceptance=0.5, out=tmp_path / "out", json_output=True)
    written = json.loads(capsys.readouterr().out)
    assert planned.pop("dry_run") and not written.pop("dry_run")
    assert planned.pop("out") is None and written.pop("out") == str(tmp_path / "out")
    assert planned == written and planned["bytes"] > planned["parameters"] > planned["tensors"] > 0


def test_without_a_folder_nothing_can_be_written() -> None:
    with pytest.raises(ConfigError, match="no --out given"):
        run(shape=SHAPE, acceptance=0.5)
