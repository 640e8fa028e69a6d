"""The examples of docs/serving.md, run against a server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.server_runs import Server

from headstart.server.completions import CompletionRequest
from headstart.server.protocol.base import HARMLESS, STRUCTURED
from headstart.server.protocol.requests import ChatRequest

DOCS = Path(__file__).parents[2] / "docs"
PAGE, COMMANDS = (DOCS / "serving.md").read_text(), (DOCS / "cli.md").read_text()
ASKING = re.findall(r"```bash\n(curl .*?)```", PAGE, re.DOTALL)
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", ASKING, ids=["chat", "stream"])
def test_every_curl_command_is_answered(api_server: Server, command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", command], env={"URL": api_server.url, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert '"choices"' in done.stdout and '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize("code", CODE, ids=["stream", "statistics"])
def test_every_python_example_runs(api_server: Server, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"url = {api_server.url!r}\n{code}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def flags_of(command: str) -> set[str]:
    """By the generated page of commands."""
    section = re.compile(rf"^### headstart {command} (.*?)(?=^###? |\Z)", re.MULTILINE | re.DOTALL)
    (found,) = section.findall(COMMANDS)
    return set(re.findall(r"`(--[a-z-]+)`", found))


def test_all_fields_and_flags_that_the_page_names_exist() -> None:
    flags = {flag for command in ("serve", "launch", "bench run") for flag in flags_of(command)}
    assert set(re.findall(r"`(--[a-z-]+)`", PAGE)) <= {*flags, "--hide-paths"}
    listed = PAGE[PAGE.index("Beside OpenAI's") : PAGE.index("Fields that change nothing")]
    assert set(re.findall(r"`([a-z_]+)`", listed)) <= {
        *ChatRequest.model_fields, *CompletionRequest.model_fields, *STRUCTURED,
    }  # fmt: skip
    accepted = PAGE[PAGE.index("Fields that change nothing") : PAGE.index("## Drafts")]
    assert set(re.findall(r"`([a-z_]+)`", accepted)) == set(HARMLESS)
