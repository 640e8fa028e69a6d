"""Command lines of docs and help: parsed by the real commands, and not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headstart.cli.commands import COMMANDS
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


def spans_of(page: str) -> list[str]:
    """Every command that stands within a sentence, as `headstart export MODEL --out DIR`."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page)
    return [
        " ".join(span.split()) for span in re.findall(r"`(headstart\s+[a-z]+(?:\s[^`]*)?)`", text)
    ]


def unknown_words(span: str) -> list[str]:
    """Of a command within a sentence: what is no command, or no option of it.

    Its values are often no more than names (`--engine E`), so it cannot be parsed.
    """
    _, name, *words = span.split()
    if name not in COMMANDS:
        return [name]
    commands = [build_command(name)]
    commands += getattr(commands[0], "commands", {}).values()
    parameters = [parameter for own in commands for parameter in own.params]
    options = {"--help", *(flag for p in parameters for flag in [*p.opts, *p.secondary_opts])}
    asked = [word.strip("[](),.'\"").partition("=")[0] for word in words]
    return [word for word in asked if word.startswith("--") and word not in options]
