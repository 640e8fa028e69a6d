"""`headstart serve MODEL`: an OpenAI-compatible server on the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import Model
from headstart.cli.spinning import limit_spinning
from headstart.engine.options import EngineOptions
from headstart.errors import MissingExtra, install
from headstart.server.limits import ServerOptions

if TYPE_CHECKING:
    from headstart.engine.engine import Engine


def run(
    *,
    model: Model,
    server: ServerOptions,
    options: EngineOptions,
    head: Annotated[
        Path | None,
        typer.Option("--head", "--draft-model", help="A head to use instead of the model's own."),
    ] = None,
) -> int:
    limit_spinning()
    try:
        from headstart.server.lifecycle import serve
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{error.name} is not installed and the server needs it. Install it: "
            f"{install('serve')}."
        ) from None

    def make_engine() -> Engine:
        from headstart.engine.engine import Engine

        return Engine(model, head, options=options)

    return serve(model, server, make_engine)
