"""The most important clients, with their real packages, do what docs/clients.md says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.server_runs import Server

ROOT = Path(__file__).resolve().parents[2]
# What `make test` has installed; the rest of the table is tried by scripts/clients/run.py alone.
NAMES = (
    "httpx", "openai", "openai_responses", "anthropic", "openai_agents", "pydantic_ai",
    "langchain", "smolagents",
)  # fmt: skip


def written() -> dict[str, dict[str, str]]:
    """The table: client -> feature -> what stands there."""
    text = (ROOT / "docs" / "clients.md").read_text().partition("<!-- made by")[2]
    lines = [line for line in text.partition("<!-- end -->")[0].splitlines() if line[:1] == "|"]
    (_, _, *features), _, *rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines
    ]
    return {name: dict(zip(features, cells, strict=True)) for name, _, *cells in rows}


def test_eight_clients_work_as_the_table_says(api_server: Server) -> None:
    program = ROOT / "tests" / "support" / "scripts" / "run_clients.py"
    done = subprocess.run(
        [sys.executable, str(program), api_server.url, *NAMES],
        capture_output=True, text=True, timeout=300,
        # Without a proxy, and without what a developer has set for these clients.
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    table = written()
    wanted = [{n: v for n, v in table[name].items() if v != "-"} for name in NAMES]
    assert dict(zip(NAMES, found, strict=True)) == dict(zip(NAMES, wanted, strict=True))
