"""The examples run, each as its docstring says, on tiny checkpoints."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.server_runs import Server
from typer.testing import CliRunner

from headstart.calibrate.tiny import write_tiny
from headstart.cli.main import app
from headstart.errors import HeadstartError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and prompts."""
    folder = tmp_path_factory.mktemp("examples")
    write_tiny("mimo", folder / "model", dtype="F32", vocab_size=5000, **SIZES)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    prompts = [{"prompt": f"t{2 + i} t{3 + 5 * i}", "category": "ab"[i % 2]} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


def headstart(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`python -m headstart` in this process: starting four of them takes longer than they do."""
    assert command[:3] == [sys.executable, "-m", "headstart"]
    done = CliRunner().invoke(app, command[3:])
    if isinstance(done.exception, HeadstartError):
        return subprocess.CompletedProcess(command, 1, b"")
    assert done.exit_code == 0, done.output
    if options.get("stdout") != subprocess.PIPE:
        print(done.stdout)
    return subprocess.CompletedProcess(command, 0, done.stdout_bytes)


def run(name: str, *arguments: str | Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(subprocess, "run", headstart)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_short_listed_and_tested() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    tested = set(re.findall(r'run\(\s*"(\w+\.py)"', Path(__file__).read_text()))
    assert found == listed == tested
    for name in found:
        assert len((EXAMPLES / name).read_text().splitlines()) < 40, name


@pytest.mark.parametrize("is_chat", [True, False], ids=["template", "no template"])
def test_generate(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_chat: bool
) -> None:
    model = place / "model"
    if not is_chat:
        model = shutil.copytree(model, tmp_path / "plain")
        (model / "chat_template.jinja").unlink()
    run("generate.py", model, "t5 t6")
    assert "same text: True" in capsys.readouterr().out


def test_openai_client(api_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run("openai_client.py", f"{api_server.url}/v1", "hello")
    assert capsys.readouterr().out.strip()


def test_tune_score_and_export(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = place / "work"
    run("tune_a_head.py", place / "model", place / "prompts.jsonl", work, "3")
    run("score_and_choose_k.py", place / "model", work / "data", work / "run" / "head")
    said = capsys.readouterr().out
    assert re.search(r"use --speculate \d", said) and "tokens per pass at K = 4" in said
    run("export_for_vllm.py", place / "model", work / "run" / "head", place / "tuned")
    said = capsys.readouterr().out
    assert "head: complete" in said and "vllm serve" in said and "mtp" in said


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_wrong_arguments_are_one_line(name: str) -> None:
    with pytest.raises(SystemExit, match=rf"usage: python examples/{name} [^\n]+$"):
        run(name, *"abcdef")


def test_what_fails_is_no_traceback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = place / "absent"
    for name, words in (
        ("generate.py", (absent,)),
        ("export_for_vllm.py", (absent, absent, place / "out")),
        ("tune_a_head.py", (absent, absent, place / "w")),
        ("score_and_choose_k.py", (absent, absent)),
        ("openai_client.py", ("http://127.0.0.1:9/v1",)),
    ):
        with pytest.raises(SystemExit):
            run(name, *words)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SystemExit, match="pip install openai"):
        run("openai_client.py")
