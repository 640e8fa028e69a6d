"""`headstart launch MODEL --engine E`: the command on stdout, notes about it on stderr."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import Json, Model, ModelType
from headstart.launch.options import LaunchOptions
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.heads.inspection import Report
    from headstart.launch.command import EngineCommand


def _engines() -> list[str]:
    from headstart.families.engines import ENGINE_TITLES

    return list(ENGINE_TITLES)


def run(
    model: Model,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="vllm, sglang, trtllm, xllm, llamacpp or mlx.",
            show_default=False,
            autocompletion=_engines,
        ),
    ],
    options: LaunchOptions,
    engine_version: Annotated[
        str | None,
        typer.Option(
            help="Write for this version instead of the installed one.", show_default=False
        ),
    ] = None,
    start: Annotated[bool, typer.Option("--run", help="Run the command as well.")] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch/--no-watch",
            help="With --run: say when drafts of the first requests are not accepted.",
        ),
    ] = True,
    score: Annotated[
        Path | None,
        typer.Option(
            "--score",
            metavar="FILE",
            help="With --run: what `score --json` promised; default: score.json beside the head.",
            show_default=False,
        ),
    ] = None,
    model_type: ModelType = None,
    json: Json = False,
) -> int | None:
    from headstart.checkpoint.hub import local_folder
    from headstart.errors import ConfigError, LaunchError
    from headstart.heads.formats import open_any
    from headstart.heads.inspection import inspect
    from headstart.launch import ENGINES, build
    from headstart.launch.probe import INSTALL, Found, probe
    from headstart.launch.run import run as run_engine

    if engine not in ENGINES:
        raise ConfigError(f"--engine is {engine!r}; expected one of {', '.join(ENGINES)}.")
    found = probe(engine) if engine_version is None or start else Found(engine_version, True)
    if start and not found.is_installed and not options.docker:
        raise LaunchError(f"--run: {engine} is not installed here. {INSTALL[engine]}.")
    report = inspect(open_any(local_folder(model)), model_type)
    is_assumed = engine_version is None and bool(found.note)
    version = engine_version or found.version
    command = build(engine, report, options, version, is_assumed=is_assumed)
    doubts = [found.note] if is_assumed else []
    costs = list(command.memory)
    if json:
        document = command.as_json()
        document |= {"notes": doubts + document["notes"], "memory": costs}
        say(json_text.dumps(document, indent=2))
    else:
        say(command.shell())
        told = {"note": [*doubts, *command.notes], "memory": costs, "warning": command.warnings}
        for kind, lines in told.items():
            for line in lines:
                say(f"{kind}: {line}", file=sys.stderr)
    if not start:
        return None
    if watch and command.num_drafts:
        _watch(command, options, report, score)
    return run_engine(command)


def _watch(
    command: EngineCommand, options: LaunchOptions, report: Report, score: Path | None
) -> None:
    """Let `headstart doctor` look at the engine's first drafts; see doctor/watch.py."""
    from headstart.doctor.verdict import promise_of
    from headstart.doctor.watch import start_beside
    from headstart.heads.predicted import SCORE_NAME

    beside = (options.head_path or report.path) / SCORE_NAME
    score = score or (beside if beside.is_file() else None)
    if score is not None:
        promise_of(score)  # a file that is no report is said before anything starts
    host = "127.0.0.1" if options.host in ("", "0.0.0.0", "::") else options.host
    words = ["doctor", f"http://{host}:{options.port}", str(report.path)]
    words += ["--speculate", str(command.num_drafts), "--engine-version", command.version]
    words += [] if score is None else ["--score", str(score.absolute())]
    start_beside(words)
