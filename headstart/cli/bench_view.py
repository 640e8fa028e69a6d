"""What `bench` shows: progress while it measures, then tables made from the document."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from headstart.bench.rows import (
    Rows,
    acceptance_rows,
    comparison_rows,
    cost_rows,
    fastmtp_table,
    gap_rows,
    spread_rows,
    task_table,
    xllm_rows,
)
from headstart.cli.look import bar_of, console_of, table_of
from headstart.report.terminal import Console, say

if TYPE_CHECKING:
    from headstart.bench.study import Step, Study
    from headstart.bench.variants import Variant

_HEAD_WIDTH = 10


def tell_plans(
    studies: Mapping[str, Study], base: Variant, *, servers: Sequence[str], json_output: bool
) -> None:
    """What would be measured, for --dry-run; by task, "" where there are none."""
    plans = [_plan(task, study, base) for task, study in studies.items()]
    if json_output:
        say(json.dumps({"plans": plans, "servers": servers, "dry_run": True}))
        return
    for plan in plans:
        names = [f"{name} (base)" if name == base.name else name for name in plan["variants"]]
        task = [f"task      {plan['task']}"] if plan["task"] else []
        lines = [
            *task,
            f"variants  {', '.join(names)}",
            f"loads     {'; '.join(plan['loads'])}",
            f"requests  {plan['requests']} in each of {plan['runs']} runs "
            f"({plan['repeats']} repeats), temperature {plan['temperature']:g}",
        ]
        say("\n".join(lines))
    for server in servers:
        say(f"server    {server}")
    say("dry run: nothing was measured", file=sys.stderr)


def _plan(task: str, study: Study, base: Variant) -> dict[str, Any]:
    return {
        "task": task or None, "variants": [variant.name for variant in study.variants],
        "base": base.name, "loads": [point.name for point in study.points],
        "requests": study.workload.num_requests, "repeats": study.repeats,
        "runs": len(study.variants) * len(study.points) * study.repeats,
        "temperature": study.workload.temperature,
    }  # fmt: skip


@contextmanager
def watching(study: Study, title: str = "") -> Iterator[Callable[[Step], None]]:
    """A bar over all requests of all runs, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    with bar_of(*columns) as bar:
        task = bar.add_task("starting", total=study.num_requests)

        def watch(step: Step) -> None:
            failed = f", {step.progress.num_failed} failed" if step.progress.num_failed else ""
            where = f"{title or step.point.name}, {step.variant}, repeat {step.repeat + 1}{failed}"
            bar.update(task, advance=1, description=where)

        yield watch


def finish(
    document: dict[str, Any], out: Path | None, *, overwrite: bool, json_output: bool
) -> None:
    """Write the folder, then print: the document for machines, tables for people."""
    from headstart.bench.folder import write_folder

    if out is not None:
        write_folder(document, out, overwrite=overwrite)
    if json_output:
        say(json.dumps(document, allow_nan=False))
        return
    show(document)
    if out is not None:
        say(f"wrote {out}")


def show(document: dict[str, Any]) -> None:
    console = console_of()
    if not document["is_valid"]:
        console.print(
            "[bold red]INVALID[/]: the load generator was late itself, see the notes; the times "
            "below may be wrong, and no advice is given",
            soft_wrap=True,
        )
    console.print(f"temperature {document['workload']['temperature']:g}")
    _print(console, "", xllm_rows(document))
    _print(console, "by task and category", task_table(document))
    _print(console, "all tasks", fastmtp_table(document))
    _print(console, "latencies in ms", spread_rows(document))
    _print(console, "gaps within answers in ms", gap_rows(document))
    title = f"against {document['base']}, 95 % intervals; with a * it may be noise"
    _print(console, title, comparison_rows(document))
    _print(console, "acceptance by depth", acceptance_rows(document))
    _print(console, "money per million tokens", cost_rows(document))
    for sentence in document["advice"]:
        console.print(f"[bold]>[/] {escape(sentence)}", soft_wrap=True)
    for note in document["notes"]:
        style = "bold red" if note.startswith("invalid") else "dim"
        console.print(f"note: {escape(note)}", style=style, soft_wrap=True)


def _print(console: Console, title: str, rows: Rows) -> None:
    """Rows with their heads as the first of them; nothing where there is no second."""
    if len(rows) < 2:
        return
    if title:
        console.print(f"\n{title}", style="dim")
    # Rich would rather fold the figures of a row than the words of a head.
    table = table_of([textwrap.fill(str(h), _HEAD_WIDTH, break_long_words=False) for h in rows[0]])
    for row in rows[1:]:
        table.add_row(*(escape(shown(cell)) for cell in row))
    console.print(table)


def shown(value: object) -> str:
    """A cell as text: two decimals, none above a thousand."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
