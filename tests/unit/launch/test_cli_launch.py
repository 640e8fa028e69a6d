from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli.launch import run
from headstart.errors import ConfigError, LaunchError
from headstart.launch import LaunchOptions


def headstart(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headstart", "launch", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_the_command_is_on_stdout_and_what_to_know_on_stderr(
    tiny: object, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("mimo")
    run(model=model, engine="vllm", options=LaunchOptions(), engine_version="0.27.1")
    out, err = capsys.readouterr()
    assert out.startswith(f"vllm serve {model}")
    assert "by the method ngram, ngram_gpu or suffix (needs arctic-inference) only in" in err
    assert "note: K = 1" in err and "memory: head weights" in err and "warning: " in err


def test_json_is_one_document_and_nothing_else(
    tiny: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run(model=tiny("mimo"), engine="sglang", options=LaunchOptions(), json=True)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == "" and document["engine"] == "sglang" and document["memory"]
    assert "not installed here" in document["notes"][0]
    assert sum("--speculative-algorithm NGRAM only in" in note for note in document["notes"]) == 1


def test_an_unknown_engine_and_running_an_absent_one_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="expected one of vllm, sglang, trtllm, xllm"):
        run(model=tmp_path, engine="ollama", options=LaunchOptions())
    with pytest.raises(LaunchError, match=r"not installed here\. pip install vllm"):
        run(model=tmp_path, engine="vllm", options=LaunchOptions(), start=True)


def test_without_an_engine_the_newest_known_is_not_said_to_be_found(
    tiny: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    model = tiny("mimo")
    with pytest.raises(LaunchError, match=r"no release has it, up to 0\.10\.1"):
        run(model=model, engine="xllm", options=LaunchOptions())
    with pytest.raises(LaunchError, match=r", found 0\.10\.0"):
        run(model=model, engine="xllm", options=LaunchOptions(), engine_version="0.10.0")


def test_running_code_of_a_checkpoint_has_to_be_allowed(tiny: object, tmp_path: Path) -> None:
    engine = tmp_path / "vllm"
    engine.write_text('#!/bin/bash\n[ "$1" = --version ] && echo 0.27.1 && exit\necho started\n')
    engine.chmod(0o755)
    model = tmp_path / "model"
    shutil.copytree(tiny("mimo"), model)
    with (model / "configuration_mimo.py").open("a") as file:
        file.write("print('theirs')\n")
    words = (str(model), "--engine", "vllm", "--run")
    path = f"{tmp_path}:{os.environ['PATH']}"
    refused = headstart(*words, PATH=path)
    assert refused.returncode == 1 and "started" not in refused.stdout
    assert "configuration_mimo.py" in refused.stderr and "--trust-remote-code" in refused.stderr
    assert "started" in headstart(*words, "--trust-remote-code", PATH=path).stdout
    shutil.copy(tiny("mimo") / "configuration_mimo.py", model)  # ours need not be read first
    assert "started" in headstart(*words, PATH=path).stdout


def test_flags_of_the_command_line_reach_the_engine_and_its_exit_code_comes_back(
    tiny: object, tmp_path: Path
) -> None:
    engine = tmp_path / "vllm"
    body = '#!/bin/bash\n[ "$1" = --version ] && echo 0.27.1 && exit\necho "$@"\nexit 6\n'
    engine.write_text(body)
    engine.chmod(0o755)
    done = headstart(
        str(tiny("mimo")), "--engine", "vllm", "--speculate", "2", "--port", "9", "--run",
        "--trust-remote-code",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert '"num_speculative_tokens": 2} --host 127.0.0.1 --port 9' in done.stdout.splitlines()[-1]
