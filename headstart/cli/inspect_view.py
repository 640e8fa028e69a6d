"""The human view of `headstart inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from headstart.cli.look import console_of, table_of
from headstart.errors import some
from headstart.heads.inspection import Report, StandaloneReport, TrunkReport
from headstart.heads.operation import megabytes
from headstart.launch.command import EngineCommand, code_warning
from headstart.report.terminal import Console, say

if TYPE_CHECKING:
    from headstart.simulate.probe import ProbeReport

_COLOURS = {
    "complete": "green",
    "undeclared": "green",
    "partial": "red",
    "declared-but-missing": "red",
    "absent": "yellow",
}


def show(
    report: Report,
    engines: Mapping[str, EngineCommand | str],
    probed: ProbeReport | None = None,
) -> None:
    """Print the report: facts first, then the probe, then commands, then warnings."""
    console = _facts(_rows(report))
    if probed is not None:
        show_probe(probed)
    usable = {name: c for name, c in engines.items() if isinstance(c, EngineCommand)}
    for name, command in usable.items():
        console.print(f"\n[bold]{name}[/]")
        # Not wrapped and without markup, so that it can be copied.
        say(command.shell())
    refused: dict[str, list[str]] = {}  # engines that say no for the same reason share a line
    for name, reason in engines.items():
        if isinstance(reason, str):
            refused.setdefault(reason, []).append(name)
    for reason, names in refused.items():
        console.print(f"\n[bold]{', '.join(names)}[/]  not available: {escape(reason)}")
    needing: dict[tuple[str, ...], list[str]] = {}
    for name, command in usable.items():
        if command.code_files:
            needing.setdefault(command.code_files, []).append(name)
    about_code = [code_warning(report.path, names, files) for files, names in needing.items()]
    for warning in [*about_code, *report.warnings]:
        console.print(f"\n[yellow]warning:[/] {escape(warning)}")


def show_probe(report: ProbeReport) -> None:
    """Print how the head did under each contract, best first."""
    console = console_of(soft_wrap=True)
    console.print(f"\n[bold]probe[/], {report.num_rows} rows")
    table = table_of(["contract", "agreement", "by chance", "log-probability"])
    for variant in (*report.variants, *report.recycled):
        own = " (registry)" if variant.contract == report.registry else ""
        table.add_row(
            f"{variant.name}{own}", f"{100 * variant.agreement:.1f} %",
            f"{100 * variant.chance:.1f} %", f"{variant.logprob:.2f}",
        )  # fmt: skip
    console.print(table)
    colour = {"registry": "green", "unclear": "yellow"}.get(report.verdict, "red")
    console.print(f"[{colour}]{report.verdict}[/]: {escape(report.said)}")


def show_standalone(report: StandaloneReport) -> None:
    """Print what a folder that holds only a head contains."""
    names = ", ".join((report.model_type or "no model_type", *report.architectures))
    layout = f", experts {report.experts}" if report.experts else ""
    console = _facts(
        [
            ("format", f"standalone {report.format} head"),
            ("family", escape(f"{report.family.name} ({report.family.title})")),
            ("config", escape(names)),
            ("head", f"{_count(report.modules)}, {report.tensors} tensors, {report.dtype}{layout}"),
            ("memory", megabytes(report.num_bytes)),
        ]
    )
    for note in report.notes:
        console.print(f"\n[yellow]warning:[/] {escape(note)}")


def _facts(rows: list[tuple[str, str]]) -> Console:
    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(f"[bold]{label}[/]", text)
    console.print(table)
    return console


def _count(modules: int) -> str:
    return f"{modules} module{'' if modules == 1 else 's'}"


def _sizes(trunk: TrunkReport) -> str:
    """Sizes that the config gives under known names, each with a comma."""
    sizes = {
        "{} layers": trunk.num_layers,
        "hidden {}": trunk.hidden_size,
        "vocabulary {}": trunk.vocab_size,
    }
    return "".join(f"{text.format(size)}, " for text, size in sizes.items() if size)


def _rows(report: Report) -> list[tuple[str, str]]:
    head, trunk = report.head, report.trunk
    names = ", ".join((report.model_type or "no model_type", *report.architectures))
    family = f"{report.family.name} ({report.family.title})" if report.family else "unknown"
    state = f"[{_COLOURS[head.state]}]{head.state}[/]"
    rows = [
        ("family", escape(family)),
        ("config" if report.format is None else "architecture", escape(names)),
        (
            "trunk",
            f"{_sizes(trunk)}{trunk.dtype}, {megabytes(trunk.num_bytes)}"
            + (f", quantised ({escape(trunk.quantization)})" if trunk.quantization else ""),
        ),
        ("head", state),
    ]
    if head.tensors:
        share = f" ({100 * head.num_bytes / max(trunk.num_bytes, 1):.1f} % of the trunk)"
        share = "" if report.is_head_alone else share
        layout = f", experts {head.experts}" if head.experts else ""
        rows += [
            ("", f"{_count(head.modules)}, {head.tensors} tensors, {head.dtype}{layout}"),
            ("memory", f"{megabytes(head.num_bytes)}{share} and {head.kv_bytes_per_token} bytes "
                       "of K/V per token"),
            ("sharing", ", ".join(f"{role} {how}" for role, how in head.shares.items())),
        ]  # fmt: skip
    if report.drafter is not None:
        found = report.drafter
        inside = f", {found.num_stages} stages, {len(found.tensors)} tensors, opaque"
        rows.append(("drafter", found.kind.name + (inside if found.is_inside else ", by itself")))
    if head.missing:
        rows.append(("missing", escape(f"{len(head.missing)}: {some(head.missing)}")))
    rows += [(label, escape(text)) for label, text in report.facts.items()]
    if report.generation:
        settings = ", ".join(f"{name} {value}" for name, value in report.generation.items())
        rows.append(("generation", escape(settings)))
    return rows
