"""`headstart bench run [MODEL] [AXIS=...]`: a load, with and without MTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from headstart.bench.arrivals import SPACINGS, LoadOptions
from headstart.bench.axes import NAMES, parse_axes, points_of
from headstart.bench.cells import Point
from headstart.bench.cost import parse_prices
from headstart.bench.measures import parse_limits
from headstart.bench.workload import WorkloadOptions, make_workload
from headstart.cli.bench_targets import TargetOptions, make_targets
from headstart.cli.options import DryRun, Head, Json, Out, Overwrite
from headstart.errors import ConfigError

_MOST_OPEN = 256  # at once, of an open loop without a limit


def run(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [AXIS=...]",
            help="Checkpoint folder, Hugging Face name or `demo`; more axes of --sweep.",
            show_default=False,
        ),
    ] = None,
    target: TargetOptions,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Axes: concurrency=1,4,16 k=0,1,3 (or rate=1,2)."),
    ] = None,
    workload: WorkloadOptions,
    load: LoadOptions,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs of each variant and load, in turn.")
    ] = 3,
    goodput: Annotated[
        str | None,
        typer.Option("--goodput", help="Limits in ms for good answers: ttft:200,tpot:20."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", help="Money per GPU-hour: on-demand=2.50,spot=1.10."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="GPUs of one server, for --price; default: 1.")
    ] = None,
    head: Head = None,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    model, axes = _split(words or [], sweep or [])
    found = parse_axes(axes)
    points = points_of(found, load)
    if found.compare is not None and target.compare is not None:
        raise ConfigError("--compare and the axis k were both given; give one of them.")
    if repeats < 1:
        raise ConfigError(f"--repeats is {repeats}; give at least 1.")
    limits = None if goodput is None else parse_limits(goodput)
    prices = parse_prices(price or [], gpus)
    targets = make_targets(model, target, head=head, compare=found.compare)
    from headstart.bench.folder import check_out
    from headstart.bench.study import measure_study
    from headstart.cli.bench_view import finish, tell_plans, watching

    check_out(out, overwrite=overwrite)
    facts = targets.facts(workload.api, is_offline=dry_run)
    questions = make_workload(
        replace(workload, api=facts.api), facts.vocabulary, notes=facts.notes
    )  # fmt: skip
    study = targets.study(points, questions, load, facts=facts, repeats=repeats, seed=workload.seed)
    most = max(point.concurrency or _MOST_OPEN for point in points)
    if dry_run:
        servers = targets.servers(most)
        tell_plans({"": study}, targets.base, servers=servers, json_output=json_output)
        return
    from headstart.bench.document import Measured, make_document

    with targets.served(most) as variants, watching(study) as watch:
        study = study.on(variants)
        outcome = measure_study(study, watch)
    if not outcome.records:
        outcome.raise_if_stopped()
    document = make_document(
        [Measured(study, outcome.records)], targets.base, limits=limits, prices=prices, model=model,
        workload={"kind": "load", **_plain(asdict(workload)), **_load(load, points)},
        notes=(*targets.notes(most), *outcome.notes),
    )  # fmt: skip
    finish(document, out, overwrite=overwrite, json_output=json_output)
    outcome.raise_if_stopped()


def _split(words: list[str], sweep: list[str]) -> tuple[str | None, list[str]]:
    """The MODEL, and axes that stand behind `--sweep AXIS` as words of their own."""
    axes = [word for word in words if word.partition("=")[0] in NAMES and "=" in word]
    rest = [word for word in words if word not in axes]
    if axes and not sweep:
        raise ConfigError(f"{axes[0]!r} stands alone; put --sweep before it.")
    if len(rest) > 1:
        raise ConfigError(f"{len(rest)} models given ({', '.join(rest)}); give one.")
    return (rest[0] if rest else None), [*sweep, *axes]


def _plain(fields: dict[str, object]) -> dict[str, object]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in fields.items()}


def _load(load: LoadOptions, points: Sequence[Point]) -> dict[str, object]:
    is_open = any(point.is_open for point in points)
    return {
        "spacing": (load.spacing or SPACINGS[0]) if is_open else None,
        "time_limit_seconds": load.time_limit_seconds,
    }
