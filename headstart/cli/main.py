"""The `headstart` command: finds the subcommand's file, runs it, turns errors into one line.

Only the chosen command's module is imported, so `--help` does not wait for torch. Exit codes: 0
done, 1 failed, 2 misuse, 130 interrupted.

A component's options live in its own frozen dataclass, with help in the fields' metadata or, for
options that are the command line's own, in annotations. A command takes that dataclass as one
parameter and gets one flag per field, so that a name, a default and a help text exist once.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import FrameType, TracebackType
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from headstart import __version__
from headstart.checkpoint.local_paths import VARIABLE as HIDE_PATHS
from headstart.cli.commands import COMMANDS, OPTION_TITLES
from headstart.cli.help import Command, Group, Overview, UsageError, misuse
from headstart.errors import ConfigError, HeadstartError
from headstart.report.terminal import say

_TORCHRUN_SECONDS = 5.0
_WIDE = {"max_content_width": 100}


class _Commands(Overview):
    _is_listing = False

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # here, because typer would end without a word
            say("interrupted", file=sys.stderr)
            raise SystemExit(130) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listing = True
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._is_listing = True  # a name's purpose is known without importing its code
        return super().shell_complete(ctx, incomplete)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._is_listing:
            # The overview needs one line per command, not their options.
            return _command(cmd_name, lambda: None)
        return build_command(cmd_name)


def build_command(name: str) -> Any:
    """The click command of one subcommand."""
    module = import_module(f"headstart.cli.{name}")
    if not hasattr(module, "SUBCOMMANDS"):
        return _command(name, _flattened(module.run), getattr(module, "CONTEXT", {}))
    # An app of its own: its subcommands' files are headstart/cli/<command>_<subcommand>.py.
    group = typer.Typer(
        cls=Group, add_completion=False, rich_markup_mode=None, no_args_is_help=True,
        help=COMMANDS[name],
    )  # fmt: skip
    for subcommand, purpose in module.SUBCOMMANDS.items():
        function = _flattened(import_module(f"headstart.cli.{name}_{subcommand}").run)
        group.command(subcommand, cls=Command, help=purpose, context_settings=_WIDE)(function)
    return typer.main.get_command(group)


def _command(name: str, function: Any, context: dict[str, Any] | None = None) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {**_WIDE, **(context or {})}
    single.command(name, cls=Command, help=COMMANDS[name], context_settings=settings)(function)
    return typer.main.get_command(single)


def _flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with every dataclass parameter replaced by one parameter per field."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    groups: dict[str, type] = {}
    parameters = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, parameter.annotation)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            groups[name] = hint
            parameters.extend(_flags(hint))
        else:
            parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))

    @wraps(function)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**_taken(group, values))
        code = function(**values)
        if code:
            raise typer.Exit(code)

    flat: Any = call  # a function, of which its type says too little
    flat.__signature__ = signature.replace(parameters=parameters)
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _taken(group: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, taken out of the values of a command line."""
    own = {}
    for field in dataclasses.fields(group):
        value = values.pop(field.name)
        parser = field.metadata.get("parser")
        own[field.name] = parser(value) if parser is not None else value
    return own


def _flags(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    result = []
    for field in dataclasses.fields(group):
        if get_origin(hints[field.name]) is Annotated:  # an option of cli/options.py
            result.append(_parameter(field.name, field.default, hints[field.name]))
            continue
        flag = f"--{field.name.replace('_', '-')}"
        # What is on, or may be, must have a way to be off.
        if field.default is True or hints[field.name] == (bool | None):
            flag = f"{flag}/--no{flag[1:]}"
        option = typer.Option(
            flag,
            help=field.metadata.get("help", ""),
            show_envvar=False,  # one line says how all of them are called
            show_default=field.default not in (None, "", False),
            rich_help_panel=OPTION_TITLES.get(group.__name__),
        )
        default = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        hint = hints[field.name]
        if "parser" in field.metadata:  # a type that typer cannot parse
            hint, default = str, str(default)
        result.append(_parameter(field.name, default, Annotated[hint, option]))
    return result


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


app = typer.Typer(
    cls=_Commands,
    context_settings=_WIDE,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Find, move, tune and serve the multi-token-prediction heads of LLM checkpoints.",
)


def _print_version(value: bool) -> None:
    if value:
        say(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    hide_paths: bool = typer.Option(
        False, "--hide-paths", help="Results and servers tell no paths of this machine."
    ),
) -> None:
    pass


def _terminate(signum: int, frame: FrameType | None) -> None:
    # As an exception, so that half-written results are removed on the way out.
    raise SystemExit(128 + signum)


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    say("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), file=sys.stderr)


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminate)
    given = [flag for flag in ("--debug", "--hide-paths") if flag in sys.argv[1:]]
    if given:  # they may stand anywhere
        sys.argv = [sys.argv[0], *given, *(w for w in sys.argv[1:] if w not in given)]
    debug = "--debug" in given
    if "--hide-paths" in given:
        os.environ[HIDE_PATHS] = "1"
    try:
        code = app(prog_name="headstart", standalone_mode=False)
    except UsageError as error:
        if debug:
            raise
        say(_explained(error), file=sys.stderr)
        sys.exit(2)
    except HeadstartError as error:
        if debug:
            raise
        if _is_said_elsewhere():
            time.sleep(_TORCHRUN_SECONDS)  # torchrun ends all when one ends: the first one prints
        else:
            say(f"error: {_as_typed(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)  # a bad option is misuse
    except OSError as error:
        if debug or isinstance(error, BrokenPipeError):
            _end_quietly(error)
        say(f"error: {_words(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        sys.excepthook = _show_traceback  # only now: typer has set its own
    sys.exit(code or 0)


def _explained(error: Any) -> str:
    """What is wrong with a command line; a group of commands alone shows its help."""
    is_bare = type(error).__name__ == "NoArgsIsHelpError"
    return str(error.format_message()) if is_bare else f"error: {misuse(error)}"


def _as_typed(error: HeadstartError) -> str:
    """The message; a setting that it begins with is called by its flag where that was given."""
    setting, _, rest = str(error).partition(" ")
    flag = f"--{setting}".replace("_", "-")
    is_typed = any(word.split("=")[0] == flag for word in sys.argv[1:])
    is_setting = setting == error.field or rest.startswith("is ")
    return f"{flag} {rest}" if is_typed and is_setting else str(error)


def _is_said_elsewhere() -> bool:
    """Whether torchrun started several processes, which refuse the same: the first one says it.

    Once they work together (train/parallel.py) an error may be of one process alone.
    """
    is_other = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    return is_other and "headstart.train.parallel" not in sys.modules


def _words(error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return str(error)
    disk = f"the disk of {error.filename}" if error.filename else "a disk that was written to"
    return (
        f"no space left on {disk} (--out, the caches, or {tempfile.gettempdir()}). Free some "
        "space, or choose other folders: --out, HEADSTART_CACHE, TMPDIR."
    )


def _end_quietly(error: OSError) -> None:
    if not isinstance(error, BrokenPipeError):
        raise error
    # The reader of our output went away (`| head`): not an error worth a line.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
