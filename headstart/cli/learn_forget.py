"""`headstart learn forget DIR`: removes what was collected, and learned heads where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.report.terminal import say


def run(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What --learn was given.")],
    heads: Annotated[bool, typer.Option("--heads", help="Remove learned heads, too.")] = False,
) -> int:
    from headstart.learn.folder import Folder, forget

    say(forget(Folder(folder), heads=heads))
    return 0
