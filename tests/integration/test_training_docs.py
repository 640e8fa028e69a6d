"""docs/training.md is true: its commands, in order, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.calibrate.tiny import write_tiny
from headstart.cli.main import app
from headstart.train.losses.kinds import KINDS
from headstart.train.options import RECIPES

# What a model of 128 tokens with 20 prompts needs instead, and a test that should not measure.
SMALLER = {
    "--max-tokens 512": "--max-tokens 64",
    "--heldout 0.1": "--heldout 0.25",
    "--size 32000": "--size 64 --bandwidth 100",
    "--max-drafts 3": "--max-drafts 3 --bandwidth 100",
    "--out run": "--out run --min-steps 6",
    "Name three rivers.": "t5 t6 t7",
}
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    page = "".join(blocks)
    for usual, small in SMALLER.items():
        assert usual in page
        page = page.replace(usual, small)
    return page.splitlines()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the prompts that the page speaks of."""
    folder = tmp_path_factory.mktemp("page")
    write_tiny("mimo", folder / "MyModel", dtype="F32")
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "MyModel" / "chat_template.jinja").write_text(template)
    prompts = [{"prompt": f"t{2 + i} t{3 + 5 * i} t{9 + i}"} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


def test_every_command_of_the_page_runs_in_order(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: starting nine of them takes longer than they do."""
    monkeypatch.chdir(workplace)
    found = commands()
    assert [line.split()[1] for line in found] == [
        "inspect", "distill", "train", "score", "score", "vocab", "score", "stitch", "generate",
    ]  # fmt: skip
    for command in found:
        program, *words = shlex.split(command)
        assert program == "headstart"
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"
    for name in ("head", "report.html", "metrics.jsonl", "options.json", "checkpoints"):
        assert (workplace / "run" / name).exists() and f"`{name}" in PAGE


def test_the_page_names_every_loss_and_recipe() -> None:
    for name in (*KINDS, *RECIPES):
        assert f"`{name}`" in PAGE or f"--recipe {name}`" in PAGE
