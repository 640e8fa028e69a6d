"""What every command that writes a folder does with its plan: show it, write it, say so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headstart.checkpoint.atomic import check_parents
from headstart.checkpoint.transfer import Copying
from headstart.cli.options import Writing
from headstart.cli.progress import byte_progress
from headstart.errors import ConfigError
from headstart.heads.operation import Operation
from headstart.report.terminal import say


def check_out(writing: Writing) -> None:
    """Refuse a target that cannot be written, before anything long is computed."""
    out = writing.out
    if out is None and not writing.dry_run:
        raise ConfigError("no --out given; say where the result goes, or add --dry-run.")
    if out is not None and out.suffix == ".gguf":
        raise ConfigError(
            f"--out is {out}; results are folders, which hold the GGUF file. Drop the ending."
        )
    if out is not None:
        check_parents(out)


def check_name(format_name: str, out: Path | None) -> None:
    """Refuse a folder's name that the engine which the head is written for would misread."""
    if format_name == "vllm" and out is not None:
        from headstart.heads.formats.vllm import check_folder_name

        check_folder_name(out.name)


def carry_out(operation: Operation, writing: Writing, *, link: bool = False) -> None:
    """Print what the operation does and, unless it is a dry run, do it."""
    check_out(writing)
    out, dry_run = writing.out, writing.dry_run
    if not dry_run and out is not None:
        with byte_progress(operation.name, operation.plan.num_bytes) as report:
            copying: Copying = "link" if link else "copy"
            operation.write(out, overwrite=writing.overwrite, copying=copying, report=report)
    if writing.json_output:
        done = {"out": None if out is None else str(out), "dry_run": dry_run}
        say(json.dumps({**operation.as_json(), **done}))
        return
    say(operation.describe())
    if dry_run:
        say("dry run: nothing was written", file=sys.stderr)
    else:
        say(f"wrote {out}")
