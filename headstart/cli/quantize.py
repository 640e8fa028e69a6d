"""`headstart quantize MODEL --bits 4|8|fp8 --data DATA --out DIR`: a smaller head for drafting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.models import check_head
from headstart.cli.options import Device, Dtype, Model, Writing, head_option
from headstart.cli.spinning import limit_spinning
from headstart.quantize.options import QuantizeOptions
from headstart.report.terminal import say


def run(
    *,
    model: Model,
    data: Annotated[
        Path, typer.Option("--data", metavar="DATA", help="Answers that `distill` wrote.")
    ],
    head: Annotated[
        Path | None, head_option("A head to quantise instead of the model's own.")
    ] = None,
    options: QuantizeOptions,
    device: Device = "auto",
    dtype: Dtype = "auto",
    writing: Writing,
) -> None:
    limit_spinning()
    from headstart.checkpoint.atomic import check_target
    from headstart.checkpoint.hub import local_folder
    from headstart.checkpoint.reader import Checkpoint
    from headstart.cli.writing import carry_out, check_out
    from headstart.simulate.source import open_records

    check_out(writing)
    checkpoint = Checkpoint.open(local_folder(model))
    if writing.out is not None and not writing.dry_run:
        inputs = (checkpoint.folder,) if head is None else (checkpoint.folder, head)
        check_target(writing.out, overwrite=writing.overwrite, inputs=inputs)
    check_head(head)
    own, held_out = (
        open_records(data, split, checkpoint, options.limit) for split in ("train", "heldout")
    )

    from headstart.cli.progress import counted_progress
    from headstart.models.build import build
    from headstart.quantize.plan import open_source, plan_quantize

    source = open_source(checkpoint, head)
    built = build(checkpoint, head, device=device, dtype=dtype)
    for note in built.notes:
        say(f"note: {note}", file=sys.stderr)
    total = sum(len(record.ids) for record in (*own, *held_out, *held_out))
    with counted_progress("tokens", total) as advance:
        operation = plan_quantize(built, source, (own, held_out), options, advance)
    carry_out(operation, writing)
