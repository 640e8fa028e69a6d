"""The human view of `headstart doctor`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from headstart.cli.look import console_of
from headstart.doctor.installed import Cache, Wish
from headstart.doctor.machine import Machine
from headstart.doctor.observing import Observation, title_of
from headstart.doctor.verdict import Finding
from headstart.families.engines import ENGINE_TITLES
from headstart.heads.operation import megabytes
from headstart.report.terminal import say

_COLOURS = {"healthy": "green", "few": "yellow", "unknown": "yellow"}


def show_server(url: str, found: Observation, finding: Finding, causes: Sequence[str]) -> None:
    """The verdict on stdout, with what it rests on; causes below."""
    version = f" {found.version}" if found.version else ""
    drafts = f", K = {found.num_drafts}" if found.num_drafts else ""
    console = console_of(soft_wrap=True)
    name = title_of(found.engine) if found.engine else "an engine that does not say which"
    console.print(f"[bold]{escape(url)}[/]  {escape(name + version + drafts)}")
    colour = _COLOURS.get(finding.verdict, "red")
    console.print(f"[{colour}]{finding.verdict}[/]: {escape(finding.said)}")
    if found.evidence is not None and len(found.evidence.by_depth) > 1:
        rates = " / ".join(f"{rate:.3f}" for rate in found.evidence.by_depth)
        console.print(
            f"accepted by depth, with all before, of rounds that drafted so deep: {rates}"
        )
    if causes:
        console.print("\n[bold]likely causes[/], the surest first")
        for number, cause in enumerate(causes, 1):
            console.print(f"{number}. {escape(cause)}")


def show_beside(finding: Finding, causes: Sequence[str]) -> None:
    """On stderr, among what an engine writes there: each line says what it comes from."""
    kind = "warning" if finding.is_bad else "note"
    say(f"headstart doctor: {kind}: {finding.verdict}: {finding.said}", file=sys.stderr)
    for cause in causes if finding.is_bad else ():
        say(f"headstart doctor: likely cause: {cause}", file=sys.stderr)


def show_machine(
    machine: Machine,
    wishes: Sequence[Wish],
    engines: Mapping[str, str | None],
    caches: Sequence[Cache],
    seconds: float,
) -> None:
    """What there is, what is missing for which wish, and what looking took."""
    console = console_of(soft_wrap=True)
    versions = ", ".join(f"{name} {found or '-'}" for name, found in machine.versions.items())
    facts = Table.grid(padding=(0, 2))
    facts.add_row("[bold]versions[/]", escape(versions))
    free = megabytes(machine.free_bytes)
    facts.add_row("[bold]cpu[/]", escape(f"{machine.cpu}, {machine.cores} cores, {free} free"))
    facts.add_row("[bold]gpus[/]", escape("; ".join(machine.gpus) or "none"))
    for name, reason in machine.backends.items():
        said = "[green]usable[/]" if reason is None else f"[yellow]no[/]: {escape(reason)}"
        if name == "torch" and reason is None and machine.torch_seconds is None:
            said = "installed, not tried"
        facts.add_row(f"[bold]backend {name}[/]", said)
    for wish in wishes:
        said = "[green]all there[/]"
        if wish.missing:
            said = f"[yellow]missing[/] {escape(', '.join(wish.missing))}: {escape(wish.how)}"
        facts.add_row(f"[bold]for {wish.name}[/]", f"{escape(wish.purpose)}: {said}")
    here = [f"{ENGINE_TITLES[name]} {found}" for name, found in engines.items() if found]
    facts.add_row("[bold]engines[/]", escape("; ".join(here) or "none that launch knows"))
    for cache in caches:
        more = "more than " if cache.is_partly_counted else ""
        size = f"{more}{megabytes(cache.num_bytes)}"
        colour = "red" if cache.is_trouble else "default"
        facts.add_row(
            "[bold]cache[/]",
            f"{escape(cache.what)}: {escape(str(cache.path))}, {size}, [{colour}]"
            f"{escape(cache.state)}[/]",
        )
    console.print(facts)
    how = "torch was not imported"
    if machine.torch_seconds is not None:
        how = f"importing torch took {machine.torch_seconds:.1f} s of them"
    say(f"looked around in {seconds:.1f} s; {how}, nothing was computed", file=sys.stderr)
