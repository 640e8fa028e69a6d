"""`headstart train MODEL --data DATA --out RUN`: tunes the head; the same command goes on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import DryRun, Json, Model, Out, Overwrite
from headstart.cli.spinning import limit_spinning
from headstart.train.options import TrainOptions

INTERRUPTED = 130


def run(
    *,
    model: Model,
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Dataset that `distill` wrote.")
    ],
    out: Out = None,
    options: TrainOptions,
    head: Annotated[
        Path | None,
        typer.Option("--head", "--draft-model", help="A head to start from, not the model's own."),
    ] = None,
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
    from headstart.cli.train_watch import CommandWatch, describe
    from headstart.errors import ConfigError
    from headstart.train.options import resolve
    from headstart.train.parallel import is_main_process
    from headstart.train.session import Job, plan
    from headstart.train.trainer import train
    from headstart.train.variants import read_variants

    if out is None and not dry_run:
        raise ConfigError("no --out given; say where the run goes, or add --dry-run.")
    job = Job(
        model=local_folder(model), data=data, out=out or Path(), head=head, overwrite=overwrite,
        options={"": resolve(options)} if variants is None else read_variants(variants, options),
    )  # fmt: skip
    with CommandWatch() as watch:
        if dry_run:
            plan(job, watch)
            watch.say("dry run: nothing was written")
            return 0
        outcomes = train(job, watch)
    if is_main_process():
        if json_output:
            print(json.dumps([asdict(outcome) for outcome in outcomes]))
        else:
            print("\n".join(describe(outcome) for outcome in outcomes))
        if not outcomes[0].is_finished:
            watch.say(f"stopped and saved in {out}; run the same command to go on")
    return 0 if outcomes[0].is_finished else INTERRUPTED
