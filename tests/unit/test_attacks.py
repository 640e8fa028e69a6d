"""scripts/attack_check.py: what it counts as a trial, and as a promise that was broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.tiny_fixture import Tiny

from headstart.checkpoint.header import read_header
from headstart.errors import BrokenFile

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from attacks import headers, kills


def test_every_malformed_header_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """A hole is found only with the whole file, which `read_header` looks at, too."""
    data = sorted(tiny("mimo").glob("*.safetensors"))[0].read_bytes()
    files = headers.malformed(data)
    assert len(files) >= 15
    assert data not in files.values()
    for what, content in files.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(BrokenFile):
            pytest.fail(f"{what}: {read_header(tmp_path / 'file')}")


def test_a_torn_document_is_noticed(tmp_path: Path) -> None:
    """Regression: headstart.json, options.json and metrics.jsonl were not looked at."""
    (tmp_path / "options.json").write_text('{"a": 1}')
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a"')  # the last line may be torn
    assert kills._torn(tmp_path) == []
    (tmp_path / "headstart.json").write_text('{"a": ')
    (tmp_path / "metrics.jsonl").write_text('{"a"\n{"a": 1}\n')
    assert [wrong.split()[0] for wrong in kills._torn(tmp_path)] == [
        "headstart.json", "metrics.jsonl",
    ]  # fmt: skip


def test_a_command_that_ended_by_itself_is_no_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was counted as one."""
    monkeypatch.setattr(kills, "command", lambda *words: ["sleep", *words])
    assert not kills._killed(["0"], tmp_path, 10)
    assert kills._killed(["10"], tmp_path, 0.05)
