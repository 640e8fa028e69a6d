"""The most important clients, with their real packages, do what docs/clients.md says of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.server_runs import running, served, write_tokenizer
from support.tiny_fixture import Tiny

ROOT = Path(__file__).resolve().parents[2]
# What `make test` has installed; the rest of the table is tried by scripts/clients/run.py alone.
NAMES = (
    "httpx", "openai", "openai_responses", "anthropic", "openai_agents", "pydantic_ai",
    "langchain", "smolagents",
)  # fmt: skip
# Without a place for tools, as the table's model.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def written() -> dict[str, dict[str, str]]:
    """The table: client -> feature -> what stands there."""
    text = (ROOT / "docs" / "clients.md").read_text().partition("<!-- made by")[2]
    lines = [line for line in text.partition("<!-- end -->")[0].splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    (_, _, *features), _, *rows = cells
    return {name: dict(zip(features, found, strict=True)) for name, _, *found in rows}


def reports(url: str) -> dict[str, dict[str, str]]:
    """What each program found, all in one process, which imports once what they share."""
    program = ROOT / "tests" / "support" / "scripts" / "run_clients.py"
    done = subprocess.run(
        [sys.executable, str(program), url, *NAMES], capture_output=True, text=True, timeout=300,
        # Without a proxy, and without what a developer has set for these clients.
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(NAMES, map(json.loads, lines), strict=True))


def test_eight_clients_work_as_the_table_says(
    tiny: Tiny, tmp_path: Path, quick_python: str
) -> None:
    folder = Path(shutil.copytree(served(tiny), tmp_path / "model"))
    write_tokenizer(folder, TEMPLATE)
    with running(folder, "--speculate", "3", python=quick_python) as server:
        found = reports(server.url)
    table = written()
    wanted = {name: {n: v for n, v in table[name].items() if v != "-"} for name in NAMES}
    assert found == wanted
    assert all(set(own.values()) == {"yes"} for own in found.values())
