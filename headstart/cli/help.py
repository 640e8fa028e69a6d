"""How commands explain themselves: tasks and groups of options, examples, the nearest name.

Plain text: tables of boxes would cut the names of options where a terminal has 80 columns.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from headstart.cli.commands import COMMANDS, EXAMPLES, TASKS
from headstart.errors import ConfigError

# Of click, which some versions of typer bring along and others import: reached through a child.
UsageError: Any = typer.BadParameter.__base__
# What the library that reads values says of them, and what is meant.
_WORDS = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "give a whole number",
    "Input should be a valid number, unable to parse string as a number": "give a number",
}
_FIRST = {"Arguments": 0, "Options": 1}


class Command(TyperCommand):
    """A command whose options stand in groups, with examples below."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                named = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault("Arguments" if is_argument else named, []).append(record)
        # A command's own options come before those of the parts that it runs.
        for title in sorted(groups, key=lambda title: _FIRST.get(title, len(_FIRST))):
            with formatter.section(title):
                formatter.write_dl(groups[title])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        show_examples(ctx.command_path.split(" ", 1)[-1], formatter)


class Group(TyperGroup):
    """A command with subcommands; a wrong one is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            raise ConfigError(
                f"there is no command '{ctx.command_path} {args[0]}'{nearest(args[0], known)} "
                f"`{ctx.command_path} --help` lists all."
            )
        return super().resolve_command(ctx, args)


class Overview(Group):
    """`headstart --help`: all commands, by task."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for task, commands in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(width), commands[name]) for name in commands])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text(
            "`headstart COMMAND --help` has options and examples. A MODEL is a checkpoint's "
            "folder, a GGUF file, a Hugging Face name, or `demo`."
        )


def show_examples(name: str, formatter: Any) -> None:
    if name not in EXAMPLES:
        return
    with formatter.section("Examples"):
        for line, purpose in EXAMPLES[name].items():
            # Not wrapped: what is copied must be whole.
            formatter.write(f"{'':{formatter.current_indent}}# {purpose}\n")
            formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def misuse(error: Any) -> str:
    """One line about a command line that could not be read, with the nearest option."""
    context = error.ctx
    path = context.command_path if context is not None else "headstart"
    if context is not None and hasattr(error, "option_name") and hasattr(error, "possibilities"):
        known = [name for own in context.command.get_params(context) for name in own.opts]
        found = nearest(error.option_name, known)
        return f"{path} has no option {error.option_name}{found} `{path} --help` lists all."
    said = error.format_message().strip().rstrip(".")
    for theirs, ours in _WORDS.items():
        said = said.replace(theirs, ours)
    return f"{said[:1].lower()}{said[1:]}; `{path} --help` says what it takes."


def nearest(given: str, known: list[str]) -> str:
    """`; did you mean X?`, or a full stop where nothing is near."""
    found = get_close_matches(given, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else "."
