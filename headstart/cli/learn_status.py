"""`headstart learn status DIR`: what was collected and learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import Json
from headstart.report.terminal import say


def run(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What --learn was given.")],
    json_output: Json = False,
) -> int:
    from headstart.learn.folder import Folder
    from headstart.learn.status import lines, status

    own = Folder(folder)
    say(json.dumps(status(own)) if json_output else "\n".join(lines(own)))
    return 0
