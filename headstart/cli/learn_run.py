"""`headstart learn run DIR --model MODEL`: learns without a server; the result is a head."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.models import check_head, check_model
from headstart.cli.options import Device, Head, Json
from headstart.cli.spinning import limit_spinning
from headstart.errors import ConfigError, MissingExtra, install
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.learn.texts import Text


def run(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What --learn was given, or a new folder.")
    ],
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="The served model.")],
    head: Head = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="DATA", help="Dataset of the first tuning, mixed in."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", metavar="FILE", help="Requests in OpenAI's batch format."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", metavar="FILE", help="Their answers, in the same format."),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Longest time to learn.")] = 60.0,
    gigabytes: Annotated[float, typer.Option("--gigabytes", help="Most disk space.")] = 1.0,
    options: Annotated[
        Path | None,
        typer.Option("--options", metavar="FILE", help="Options of `headstart train`, as JSON."),
    ] = None,
    device: Device = "auto",
    json_output: Json = False,
) -> int:
    limit_spinning()
    from headstart.learn.folder import Folder
    from headstart.learn.options import LearnOptions

    if (requests is None) != (answers is None):
        raise ConfigError("--requests and --answers belong together; give both.")
    own = Folder(folder)
    own.check_free()
    if requests is None and not own.is_there:
        raise ConfigError(
            f"{folder} is not a folder of `headstart serve --learn`, and there is nothing else to "
            "learn from. Give one that is, or --requests and --answers."
        )
    check_model(model)
    check_head(head)
    from headstart.learn.starting import open_folder

    logged = _read(model, requests, answers) if requests is not None and answers is not None else []
    asked = LearnOptions(
        learn=folder, learn_gigabytes=gigabytes, learn_base=base, learn_options=options
    )
    task = open_folder(asked, model, head, device=device, dtype="auto")
    from headstart.learn.offline import add_texts, learn_offline

    if logged:
        add_texts(own, logged)
    outcome = learn_offline(task, minutes, lambda text: say(text, file=sys.stderr))
    if json_output:
        say(json.dumps(outcome.as_json()))
    elif outcome.head is None:
        say(f"no better head was found: {outcome.reason}")
    else:
        say(f"the head is {outcome.head}; headstart stitch {outcome.head} {model} --out NEW")
    return 0


def _read(model: str, requests: Path, answers: Path) -> list[Text]:
    from headstart.checkpoint.hub import local_folder
    from headstart.data.prompt_reader import PromptReader
    from headstart.heads.formats import open_runnable
    from headstart.learn.batch_logs import read_batches

    try:
        from headstart.server.logged import LoggedPrompts
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{error.name} is not installed and --requests needs it: prompts are read as the "
            f"server reads them. Install it: {install('serve')}."
        ) from None

    reader = PromptReader(open_runnable(local_folder(model), "Give its model."))
    logged = read_batches(requests, answers, reader, LoggedPrompts(reader).read)
    say(logged.describe(), file=sys.stderr)
    return logged.texts
