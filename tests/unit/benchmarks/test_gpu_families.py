"""The program that compares every family with vLLM: what it asks for, and what it says of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_families
import pytest
from gpu_families import FAMILIES, main, summary
from versus.plan import parse_plan

from headstart.calibrate.shape_config import shape_config


def test_every_shape_and_the_plan_are_known() -> None:
    assert all(shape_config(case.shape)["vocab_size"] for case in FAMILIES.values())
    for group in parse_plan(gpu_families._PLAN):
        found = [(stage.kind, stage.requests, stage.prompt) for stage in group.stages]
        assert found == [("answer", n, None) for n in (1, 16, 64, 128)] + [
            ("first", 1, 2500), ("first", 1, 30000),
        ]  # fmt: skip


def test_a_family_that_fails_is_told_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "calibrate" in command:
            if "ernie-4.5-21b" in command:
                raise subprocess.CalledProcessError(1, command)
            return subprocess.CompletedProcess(command, 0)
        out = Path(command[command.index("--out") + 1])
        engines = {"headstart": {"value": 30.0}, "vllm": {"value": 20.0}}
        row = {"k": 3, "stage": "answer", "requests": 16, "engines": engines}
        out.write_text(json.dumps({"failures": ["K = 0: no start"], "rows": [row]}))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    words = ["gpu_families.py", str(tmp_path), "--families", "ernie,glm"]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "ernie: ; 1 failed" in lines and "glm: K=3 16 1.50x; 1 failed" in lines
    assert set(json.loads(lines[-1])) == {"ernie", "glm"}


def test_a_summary_is_above_one_where_ours_is_faster() -> None:
    times = {name: {"first_token_seconds": {"value": value}} for name, value in
             (("headstart", 0.1), ("vllm", 0.2))}  # fmt: skip
    rows = [
        {"k": 0, "stage": "first", "requests": 1, "prompt": 2500, "engines": times},
        {"k": 0, "stage": "answer", "requests": 1, "engines": {"headstart": {"value": 1.0}}},
    ]
    assert summary({"rows": rows, "failures": []}) == "K=0 first 2500 2.00x, K=0 1 -"
