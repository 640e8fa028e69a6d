"""Command lines of docs and help: parsed by the real commands, and not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headstart.cli.main import build_command


def parse(line: str) -> str:
    """The command that a line runs.

    Raises what a user would be told, for an unknown command or option, or a missing one.
    """
    words = shlex.split(line, comments=True)
    words = words[words.index("headstart") + 1 :]
    command = build_command(words.pop(0))
    if hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    with pytest.MonkeyPatch.context() as patch:
        # A head that is not there could be a name on the hub, which is asked while parsing.
        patch.setattr("headstart.checkpoint.hub.local_folder", Path)
        command.make_context(str(command.name), words)
    return str(command.name)


def lines_of(page: str) -> list[str]:
    """Every command in the fenced blocks of a page, lines that go on joined."""
    blocks = re.findall(r"(?ms)^```(?:bash|sh|console|)\n(.*?)^```$", page)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    shown = (line.strip().removeprefix("$ ") for line in lines)
    return [line for line in shown if re.match(r"headstart [a-z]+(?: |$)", line)]
