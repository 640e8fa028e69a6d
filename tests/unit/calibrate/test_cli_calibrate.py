from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.checkpoint.reader import Checkpoint
from headstart.cli.calibrate import run
from headstart.data.prompt_reader import PromptReader
from headstart.errors import ConfigError

SHAPE = "layers=1,hidden=64,intermediate=96,heads=4,kv_heads=2,vocab=32"


def test_a_dry_run_prints_sizes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(shape=SHAPE, acceptance=0.5, out=out, dry_run=True)
    said = capsys.readouterr()
    assert " MB, " in said.out and "GB" not in said.out and "words are t2 to t31;" in said.out
    assert "parameters" in said.out and "wrote" not in said.out
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


def test_messages_can_be_put_to_what_was_written(tmp_path: Path) -> None:
    run(shape=SHAPE, acceptance=0.5, out=tmp_path / "out")
    reader = PromptReader(Checkpoint.open(tmp_path / "out"))
    messages = [
        {"role": "system", "content": "t9"},
        {"role": "user", "content": "t3 t31 hello t32"},
    ]
    assert reader.read(messages) == [9, 3, 31, 0, 0]


def test_too_many_tokens_for_the_hidden_size_are_told_how_many_would_do(tmp_path: Path) -> None:
    large = SHAPE.replace("vocab=32", "vocab=4000")
    with pytest.raises(
        ConfigError, match=r"too close .* or --active (\d+), which would do"
    ) as told:
        run(shape=large, acceptance=0.5, dry_run=True)
    enough = int(str(told.value).rsplit("--active ", 1)[1].split(",")[0])
    run(shape=large, acceptance=0.5, active=enough, dry_run=True)
    with pytest.raises(ConfigError, match=r"only .* apart"):
        run(shape=large, acceptance=0.5, active=4 * enough, dry_run=True)
