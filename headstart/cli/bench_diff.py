"""`headstart bench diff OLD NEW`: what changed between two results, and whether it is noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from headstart.cli.options import Json
from headstart.report.terminal import say

_SHOWN = {
    "output_tokens_per_second": ("output tokens/s", 1.0),
    "tpot_seconds": ("mean TPOT ms", 1e3),
    "ttft_seconds": ("mean TTFT ms", 1e3),
}
_STYLES = {"better": "green", "worse": "bold red"}  # where sure


def run(
    *,
    old: Annotated[Path, typer.Argument(metavar="OLD", help="bench.json, or its folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="bench.json, or its folder.")],
    fail_on_worse: Annotated[
        bool,
        typer.Option(
            "--fail-on-worse",
            help="Exit with 1 if a figure is surely worse (Holm's method over all).",
        ),
    ] = False,
    json_output: Json = False,
) -> int:
    from headstart.bench.diff import diff
    from headstart.bench.document import read_document

    found = diff(read_document(old), read_document(new))
    if json_output:
        say(json.dumps(found))
    else:
        _show(found)
    return 1 if fail_on_worse and found["num_surely_worse"] else 0


def _show(found: dict[str, Any]) -> None:
    from headstart.bench.rows import interval, load_name
    from headstart.cli.bench_view import shown
    from headstart.cli.look import console_of, table_of

    console = console_of()
    if not found["is_valid"]:
        console.print("[bold red]one of the results is marked as INVALID[/]", soft_wrap=True)
    for name, (before, after) in found["settings"].items():
        console.print(f"{escape(name)}: {escape(str(before))} -> {escape(str(after))}")
    heads = ("method", "load", "figure", "old", "new", "ratio", "verdict")
    table = table_of(heads, left=["verdict"])
    for cell in found["cells"]:
        for name, (label, factor) in _SHOWN.items():
            figure = cell["figures"][name]
            verdict, is_sure = figure["verdict"], figure["sure"]
            doubt = "" if is_sure or verdict not in _STYLES else " (may be chance)"
            values = [figure[side] for side in ("old", "new")]
            table.add_row(
                escape(cell["variant"]), load_name(cell), label,
                *(shown(None if value is None else factor * value) for value in values),
                shown(interval(figure["ratio"])), verdict + doubt,
                style=_STYLES[verdict] if is_sure else "dim",
            )  # fmt: skip
    console.print(table)
    for side in ("only_in_first", "only_in_second"):
        for cell in found[side]:
            console.print(f"{side.replace('_', ' ')}: {escape(cell['variant'])}, {load_name(cell)}")
    changed = found["num_better"] + found["num_worse"]
    sure = found["num_surely_better"] + found["num_surely_worse"]
    console.print(
        f"{changed} of {found['num_figures']} figures changed beyond noise, of which about "
        f"{0.05 * found['num_figures']:.1f} would by chance alone; {sure} surely. "
        + ("Compared request by request." if found["paired"] else "The questions differ."),
        soft_wrap=True,
    )
