"""`headstart distill MODEL --prompts FILE --out DATA`: let the model write its training text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.models import check_head
from headstart.cli.options import DryRun, Head, Json, Model
from headstart.cli.spinning import limit_spinning
from headstart.distill.options import DistillOptions
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError
from headstart.heads.operation import counted
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.distill.run import Outcome, Plan


def run(
    *,
    model: Model,
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Prompts or conversations (JSONL); with --import also a folder that vLLM filled.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DATA", help="The dataset; an earlier one goes on.")
    ],
    as_given: Annotated[
        bool, typer.Option("--import", help="Take the answers in the file instead of asking.")
    ] = False,
    options: DistillOptions,
    head: Head = None,
    engine_options: EngineOptions,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Refused: a dataset is only ever added to.")
    ] = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> int:
    limit_spinning()
    from headstart.cli.progress import counted_progress
    from headstart.distill.run import distill, plan

    if overwrite:
        raise ConfigError(
            "distill adds to a dataset and never replaces one: its answers cost too much. To start "
            f"anew, choose another --out, or remove {out} yourself."
        )
    check_head(head)
    planned = plan(model, prompts, out, options, as_given=as_given)
    if dry_run:
        _print_plan(planned, as_json=json_output)
        return 0
    num_kept = planned.num_known

    def kept(count: int) -> None:
        nonlocal num_kept
        num_kept += count
        advance(count)

    try:
        with counted_progress("answers", planned.num_left) as advance:
            outcome = distill(
                planned, options, engine_options, head=head, report=kept,
                warn=lambda text: say(f"note: {text}", file=sys.stderr),
            )  # fmt: skip
    except KeyboardInterrupt:
        said = f": {counted(num_kept, 'answer')} so far, kept in {out}" if num_kept else ""
        say(f"interrupted{said}. Run the same command again to go on.", file=sys.stderr)
        return 130
    _print_outcome(planned, outcome, as_json=json_output)
    return 0


def _print_plan(planned: Plan, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps({**planned.as_json(), "dry_run": True}))
        return
    say(
        f"{counted(len(planned.conversations), 'prompt')}, "
        f"{counted(planned.num_left, 'answer')} to ask for at most, {planned.num_known} known "
        "already"
    )
    say("dry run: nothing was asked or written", file=sys.stderr)


def _print_outcome(planned: Plan, outcome: Outcome, *, as_json: bool) -> None:
    header = outcome.header
    if as_json:
        document = {
            "out": str(planned.out),
            "new_answers": outcome.num_new,
            "counts": header.counts,
            "report": header.report,
            "acceptance": outcome.acceptance,
            "notes": outcome.advice,
        }
        say(json.dumps(document))
        return
    report, train, heldout = header.report, header.counts["train"], header.counts["heldout"]
    say(f"answers   {report['answers']}, {outcome.num_new} of them new")
    for name, part in (("train", train), ("held out", heldout)):
        say(f"{name:<8}  {counted(part['records'], 'answer')}, {part['answer_tokens']} tokens")
    for reason, found in report["dropped"].items():
        say(f"dropped   {found['count']} {reason}, such as {found['examples'][0]}")
    if report["refused"]["count"]:
        name, why = next(iter(report["refused"]["examples"].items()))
        say(f"refused   {report['refused']['count']}, such as {name}: {why}")
    if outcome.acceptance is not None and outcome.acceptance["drafted"]:
        say(f"drafting  acceptance length {outcome.acceptance['acceptance_length']:.2f}")
    for note in outcome.advice:
        say(f"note: {note}", file=sys.stderr)
    say(f"wrote {planned.out}")
