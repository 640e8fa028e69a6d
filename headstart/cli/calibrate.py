"""`headstart calibrate --shape S --acceptance R --out DIR`: a model of known acceptance."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from headstart.cli.options import DryRun, Json, Out, Overwrite


def run(
    *,
    shape: Annotated[str, typer.Option("--shape", help="A model's name, or numbers.")],
    acceptance: Annotated[
        float, typer.Option("--acceptance", help="Rate at which a draft is right, at every depth.")
    ],
    out: Out = None,
    active: Annotated[
        int | None, typer.Option("--active", help="Tokens in use; default: all but two.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="BF16, F16 or F32.")] = "BF16",
    seed: Annotated[int, typer.Option("--seed", help="Which of many such checkpoints.")] = 0,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    from headstart.calibrate.calibrated import write_calibrated
    from headstart.cli.progress import byte_progress
    from headstart.errors import ConfigError

    if dtype not in ("BF16", "F16", "F32"):
        raise ConfigError(f"--dtype is {dtype!r}; expected BF16, F16 or F32.")
    if out is None and not dry_run:
        raise ConfigError("no --out given; say where the result goes, or add --dry-run.")
    with byte_progress("calibrate", 0) as report:
        made = write_calibrated(
            shape, acceptance, None if dry_run else out, active=active, seed=seed, dtype=dtype,
            overwrite=overwrite, report=report,
        )  # fmt: skip
    if json_output:
        done = {"out": None if out is None else str(out), "dry_run": dry_run}
        print(json.dumps({**made, **done}))
        return
    print(
        f"{made['tensors']} tensors, {made['parameters']} parameters, "
        f"{_size(made['bytes'])}, {made['active']} tokens in use, acceptance "
        f"{acceptance} at every depth, decisions {made['margin']:.2f} apart over "
        f"{made['margin_tokens']} tokens tried"
    )
    print(f"its words are t2 to t{made['vocab'] - 1}; any other word is read as token 0")
    if dry_run:
        print("dry run: nothing was written", file=sys.stderr)
    else:
        print(f"wrote {out}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
