"""`headstart doctor [URL [MODEL]]`: is a server's head alive; without URL, what is installed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import Json
from headstart.errors import ConfigError
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.doctor.observing import Observation, RunningServer
    from headstart.doctor.verdict import Finding, Promise
    from headstart.heads.inspection import Report


def run(
    *,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", help="A running server, ours or another.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Its checkpoint: for causes, and score.json.",
            show_default=False,
        ),
    ] = None,
    score: Annotated[
        Path | None,
        typer.Option(
            "--score",
            metavar="FILE",
            help="What `score --json` printed; default: MODEL/score.json.",
            show_default=False,
        ),
    ] = None,
    ask: Annotated[int, typer.Option("--ask", help="Requests of our own to judge by.")] = 0,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Judge by what is drafted from now on, this long.")
    ] = 0.0,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="Its name there.", show_default=False)
    ] = None,
    speculate: Annotated[
        int | None,
        typer.Option("--speculate", help="K, where the server does not say.", show_default=False),
    ] = None,
    engine_version: Annotated[
        str | None,
        typer.Option("--engine-version", help="Where it does not say.", show_default=False),
    ] = None,
    wish: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="WISH",
            show_default=False,
            help="Without URL: fail if something is missing for serve, bench, train, cpu, gpu, "
            "gguf, demo, vllm, sglang, trtllm, xllm or llamacpp.",
        ),
    ] = None,
    watched: Annotated[int | None, typer.Option("--while", metavar="PID", hidden=True)] = None,
    json_output: Json = False,
) -> int:
    if url is None:
        given = {"--score": score, "--ask": ask, "--seconds": seconds, "--speculate": speculate}
        if any(given.values()):
            flag = next(name for name, value in given.items() if value)
            raise ConfigError(f"{flag} is about a running server; give its URL.")
        return _about_this_machine(wish, json_output)
    if wish is not None:
        raise ConfigError("--for is about this machine; leave the URL out.")
    if ask < 0 or seconds < 0 or (ask and seconds):
        raise ConfigError("--ask and --seconds are two ways to judge, above 0; give one of them.")

    from headstart.bench.target import Target
    from headstart.doctor.observing import RunningServer, observe
    from headstart.doctor.watch import Watched

    server = RunningServer(Target(url=url, model=served_model), version=engine_version)
    report, promise = _known(model, score)
    if watched is None:
        found = observe(server, ask=ask, seconds=seconds, num_drafts=speculate)
        return _told(server, found, report, promise, json_output)
    looked = Watched(watched).looks(server, speculate)
    if looked is None:
        return 0
    return _told(server, looked, report, promise, json_output, is_beside=True)


def _known(model: str | None, score: Path | None) -> tuple[Report | None, Promise | None]:
    """What the checkpoint says, and what was promised for its head."""
    from headstart.checkpoint.hub import local_folder
    from headstart.doctor.verdict import found_promise, promise_of
    from headstart.heads.formats import open_any
    from headstart.heads.inspection import inspect

    report = None if model is None else inspect(open_any(local_folder(model)))
    if score is not None:
        return report, promise_of(score)
    return report, None if report is None else found_promise(report.path)


def _told(
    server: RunningServer,
    found: Observation,
    report: Report | None,
    promise: Promise | None,
    json_output: bool,
    *,
    is_beside: bool = False,
) -> int:
    from headstart.cli.doctor_view import show_beside, show_server
    from headstart.doctor.causes import Case, likely_causes

    finding = _judged(found, promise)
    causes = likely_causes(Case(found.engine, found.version, report, finding.verdict))
    if json_output:
        document: dict[str, Any] = {
            "url": server.target.root, **found.as_json(),
            "promise": None if promise is None else promise.as_json(),
            "verdict": finding.verdict, "said": finding.said, "likely_causes": causes,
        }  # fmt: skip
        say(json.dumps(document, indent=2))
    elif is_beside:
        show_beside(finding, causes)
    else:
        show_server(server.target.root, found, finding, causes)
    return 0 if finding.verdict == "healthy" else 1


def _judged(found: Observation, promise: Promise | None) -> Finding:
    from headstart.doctor.verdict import Finding, judge

    if found.evidence is not None:
        return judge(found.evidence, promise, found.num_drafts)
    if found.is_off:
        return Finding("off", "tokens were written, and not one draft was counted.")
    return Finding("unknown", found.missing)


def _about_this_machine(wish: str | None, json_output: bool) -> int:
    began = time.perf_counter()
    from headstart.cli.doctor_view import show_machine
    from headstart.doctor.installed import WISHES, caches, engine_wish, engines, wishes
    from headstart.doctor.machine import look_around
    from headstart.families.engines import ENGINE_TITLES

    if wish is not None and wish not in (*WISHES, *ENGINE_TITLES):
        expected = ", ".join((*WISHES, *ENGINE_TITLES))
        raise ConfigError(f"--for is {wish!r}; expected one of {expected}.")
    machine, wanted, kept, there = look_around(), wishes(), caches(), engines()
    problems = [*machine.problems]
    problems += [f"{each.what}: {each.path}: {each.state}" for each in kept if each.is_trouble]
    asked = [each for each in wanted if each.name == wish]
    asked += [engine_wish(wish)] if wish in ENGINE_TITLES else []
    for each in asked:
        if each.missing:
            problems.append(f"missing for {wish}: {', '.join(each.missing)}. {each.how}.")
    if wish == "gpu" and (reason := machine.backends["cuda"]) is not None:
        problems.append(f"no GPU can be used: {reason}.")
    seconds = time.perf_counter() - began
    if json_output:
        document = {
            **machine.as_json(),
            "wishes": {each.name: each.as_json() for each in wanted},
            "engines": there,
            "caches": [each.as_json() for each in kept],
            "problems": problems,
            "seconds": seconds,
        }
        say(json.dumps(document, indent=2))
    else:
        show_machine(machine, wanted, there, kept, seconds)
        for problem in problems:
            say(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0
