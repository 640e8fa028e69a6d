"""`--config FILE.yaml`: options of a command in a file, under the names that they have as flags.

The command line comes first, then variables, then the file, then defaults. Values are text, as on
the command line: YAML's own reading would make a truth value of `off`, and 83 of the key `0123`.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.errors import ConfigError, first_line
from headstart.files import read_text, why_unreadable

_MOST_BYTES = 1 << 20
_NOT_GIVEN = ("", "~", "null", "Null", "NULL")


def _read(ctx: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **_defaults(ctx, path)}
    return path


def _defaults(ctx: typer.Context, path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.load(read_text(path, _MOST_BYTES), yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = first_line(error) if isinstance(error, yaml.YAMLError) else why_unreadable(error)
        raise ConfigError(
            f"--config is {str(path)!r}, which cannot be read ({why}). Give a YAML "
            "file of options, as `port: 8000`."
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"--config is {str(path)!r}, which holds no options, as `port: 8000`.")
    known = {own.name: own for own in ctx.command.params if own.name not in (None, "config")}
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = get_close_matches(name, map(str, known), 1)
            do = f"Did you mean {near[0].replace('_', '-')!r}?" if near else "Leave it out."
            raise ConfigError(f"{path} holds {str(key)[:80]!r}, which is no option. {do}")
        if value not in _NOT_GIVEN:
            is_list = getattr(known[name], "multiple", False) and not isinstance(value, list)
            found[name] = [value] if is_list else value
    return found


Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", is_eager=True, callback=_read, show_default=False,
        help="YAML file with options, by the names of flags; HEADSTART_SERVE_PORT and its like "
        "hold options as well.",
    ),
]  # fmt: skip
