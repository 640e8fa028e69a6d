"""`headstart train MODEL --data DATA --out RUN`: tunes the head; the same command goes on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import DryRun, Json, Model, Out, Overwrite, head_option
from headstart.cli.spinning import limit_spinning
from headstart.report.terminal import say
from headstart.train.options import TrainOptions

if TYPE_CHECKING:
    from headstart.cli.train_watch import CommandWatch
    from headstart.train.job import Job

INTERRUPTED = 130


def run(
    *,
    model: Model,
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Dataset that `distill` wrote.")
    ],
    out: Out = None,
    options: TrainOptions,
    head: Annotated[Path | None, head_option("A head to start from, not the model's own.")] = None,
    variants: Annotated[
        Path | None,
        typer.Option("--variants", metavar="FILE", help="Heads to train side by side, as JSON."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> int:
    limit_spinning()
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.train_watch import CommandWatch
    from headstart.errors import ConfigError
    from headstart.train.job import Job
    from headstart.train.options import resolve
    from headstart.train.variants import read_variants

    if out is None and not dry_run:
        raise ConfigError("no --out given; say where the run goes, or add --dry-run.")
    own = {"": resolve(options)} if variants is None else read_variants(variants, options)
    job = Job(
        model=local_folder(model), data=data, out=out, head=head, overwrite=overwrite, options=own
    )
    job.check()  # before torch is imported
    with CommandWatch() as watch:
        if dry_run:
            return _plan(job, watch, as_json=json_output)
        return _train(job, watch, as_json=json_output)


def _plan(job: Job, watch: CommandWatch, *, as_json: bool) -> int:
    from headstart.train.parallel import is_main_process
    from headstart.train.plan import plan

    if is_main_process():
        planned = plan(job, watch)
        say(json.dumps(planned.as_json()) if as_json else planned.describe())
        watch.say("dry run: nothing was written")
    return 0


def _train(job: Job, watch: CommandWatch, *, as_json: bool) -> int:
    from headstart.cli.train_watch import describe, ranking
    from headstart.train.parallel import is_main_process
    from headstart.train.trainer import train

    outcomes = train(job, watch)
    is_finished = outcomes[0].is_finished
    if is_main_process():
        if as_json:
            say(json.dumps([asdict(outcome) for outcome in outcomes]))
        else:
            say("\n".join(describe(outcome) for outcome in outcomes))
        if "" not in job.options and not as_json:
            say("\n".join(ranking(outcomes)))
            if is_finished:
                say(f"wrote {job.out}/report.html, which compares them")
        if not is_finished:
            watch.say(f"stopped and saved in {job.out}; run the same command to go on")
    return 0 if is_finished else INTERRUPTED
