"""The server without an engine: every token that was asked for comes through."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import server_alone
from support.long_runs import long_only
from support.server_runs import VOCAB, write_tokenizer

from headstart.calibrate.calibrated import write_calibrated
from headstart.calibrate.given_tokenizer import read_tokenizer


@long_only
def test_the_server_passes_on_what_nothing_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path)
    shape = f"layers=1,hidden=512,intermediate=96,heads=4,kv_heads=2,vocab={VOCAB}"
    model = tmp_path / "model"
    write_calibrated(shape, 0.8, model, dtype="F32", tokenizer=read_tokenizer(tmp_path))
    options = "--streams 2 --round-ms 0 --tokens 7 --answers 2 --per-round 3"
    monkeypatch.setattr(sys, "argv", ["server_alone.py", str(model), *options.split()])
    monkeypatch.setenv(server_alone._SETTINGS, "")
    server_alone.main()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["streams"] == 2 and row["tokens_per_second"] > 0
    assert row["event_loop_us_per_token"] > 0
