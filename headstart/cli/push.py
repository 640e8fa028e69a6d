"""`headstart push HEAD --server URL`: another head into a running server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import Json
from headstart.report.terminal import say


def run(
    *,
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A head in any format, or a model with one.")
    ],
    server: Annotated[
        str, typer.Option("--server", metavar="URL", help="The server, as http://127.0.0.1:8000.")
    ],
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="File with the server's key; HEADSTART_PUSH_KEY holds it as well.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="For vLLM on another machine: a folder that both have under this name.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout-seconds", help="Longest wait for the server.")
    ] = 600.0,
    json_output: Json = False,
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.progress import byte_progress
    from headstart.data.api_keys import push_key
    from headstart.heads.formats import open_head
    from headstart.push.address import Address
    from headstart.push.sent_head import SentHead
    from headstart.push.servers import push

    found = open_head(local_folder(head))
    key = push_key(key_file, "--key-file")
    with byte_progress("push", SentHead.of(found).num_bytes) as report:
        pushed = push(Address(server, timeout, folder), found, key, report)
    if json_output:
        say(json.dumps(dataclasses.asdict(pushed)))
        return
    say(
        f"{server} drafts with it from now on: head version {pushed.head_version}, "
        f"{pushed.digest}, {pushed.num_bytes / 1e6:.1f} MB"
    )
