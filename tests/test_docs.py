"""The docs are true: README commands run, generated pages are current, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import headstart

from headstart.calibrate.tiny import write_tiny
from headstart.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that the README's examples name, small ones."""
    folder = tmp_path_factory.mktemp("readme")
    write_tiny("glm4_moe", folder / "GLM-4.5-Air")
    write_tiny("glm4_moe", folder / "air-tuned", with_head=False, seed=1)
    write_tiny("llama", folder / "Llama-3.2-1B")
    return folder


def test_the_readme_has_at_most_200_lines() -> None:
    assert len(README.splitlines()) <= 200


def test_every_command_in_the_readme_runs(workplace: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("headstart ")]
    assert len(commands) >= 9
    for command in commands:
        _, *words = shlex.split(command, comments=True)
        result = headstart(*words, cwd=workplace)
        assert result.returncode == 0, f"{command}\n{result.stderr}"


def test_the_python_in_the_readme_runs_after_the_commands(workplace: Path) -> None:
    (code,) = blocks("python")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "complete" in result.stdout
    assert (workplace / "air-again" / "config.json").is_file()


def test_generated_pages_are_current() -> None:
    script = ROOT / "scripts" / "generate_docs.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_the_docs_name_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:headstart|scripts|tools|tests|benchmarks)/[\w/.-]+\.\w+)`", page.read_text()
    )
    for name in named:
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_python_of_the_engine_page_runs(workplace: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine.md").read_text(), re.DOTALL)
    write_tiny("mimo", workplace / "model", dtype="F32")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_only_commands_that_exist_are_named_to_users() -> None:
    named = r"headstart[ \n]+(\w+)(?=[ `\n])"
    verbs = {"train", "serve", "bench", "score", "vocab", "distill", "demo"} - set(COMMANDS)
    sources = [*PAGES, *(ROOT / "headstart").rglob("*.py")]
    for path in sources:
        wrong = verbs & set(re.findall(named, path.read_text().replace('"\n', "")))
        assert not wrong, f"{path.name} sends users to {wrong}"
