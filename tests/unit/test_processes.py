"""No command executes Python files that lie in the folder where it was started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headstart
from headstart.bench.own_server import own_servers
from headstart.bench.variants import Variant
from headstart.errors import LaunchError, ServerError
from headstart.launch.command import Preparation
from headstart.launch.run import _prepare
from headstart.server.grammars.client import CompilerProcess

PACKAGE = Path(headstart.__file__).parent
NAMES = ("typer", "xgrammar", "torch", "rich", "headstart_planted")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files in it that say when they are executed."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r} + '\\n')\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    # Empty parts of the variable would mean the working directory, too: that is the user's word.
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE.parent), *places]))
    return tmp_path


def executed(folder: Path) -> list[str]:
    file = folder / "executed"
    return file.read_text().split() if file.exists() else []


def test_the_planted_files_would_be_executed(planted: Path) -> None:
    subprocess.run([sys.executable, "-m", "headstart_planted"], check=True)
    assert executed(planted) == ["headstart_planted"]


def test_the_process_that_compiles_grammars_takes_no_code_from_the_folder(
    planted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = CompilerProcess("no vocabulary at all", max_seconds=1, max_memory=1 << 30)
    deadline = time.monotonic() + 60
    while process._forks._process.poll() is None:  # it ends when it has read that
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.close()
    assert executed(planted) == []
    assert "xgrammar" in capfd.readouterr().err, "it came as far as using the library"


def test_the_server_of_bench_takes_no_code_from_the_folder(planted: Path) -> None:
    variant = Variant(name="plain", drafts=0)
    with pytest.raises(ServerError, match="ended with"):
        with own_servers("no-such-model", [variant], max_concurrency=1, flags=[]):
            pass
    assert executed(planted) == []


def test_what_launch_prepares_takes_no_code_from_the_folder(planted: Path) -> None:
    argv = ("headstart", "export", "no-such-model", "--out", "never")
    with pytest.raises(LaunchError, match="could not be made"):
        _prepare(Preparation(planted / "never", argv))
    assert executed(planted) == []


def test_the_command_as_a_module_takes_no_code_from_the_folder(planted: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "headstart", "inspect", "."], capture_output=True, text=True
    )
    assert executed(planted) == [] and "config.json" in said.stderr, said.stderr


def test_python_is_started_in_one_place() -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "sys.executable" in path.read_text() or "multiprocessing" in path.read_text()
    ]
    assert users == ["processes.py"]
