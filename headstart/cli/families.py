"""`headstart families`: what is supported, straight from the registry."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Annotated, Any

import typer

from headstart.cli.options import Json
from headstart.families.base import Family
from headstart.report.terminal import say

_WIDTH = 120  # of lines in docs


def run(
    *,
    json_output: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as it stands in the docs.")
    ] = False,
) -> None:
    rows = family_rows()
    if json_output:
        say(json.dumps(rows, indent=2))
    elif markdown:
        say(markdown_table(rows))
    else:
        _show(rows)


def family_rows() -> list[dict[str, Any]]:
    """The facts of every family, by name."""
    from headstart.families.registry import families

    return [_facts(family) for family in sorted(families(), key=lambda f: f.name)]


def _facts(family: Family) -> dict[str, Any]:
    from headstart.families.engines import ENGINE_TITLES, served_by
    from headstart.heads.formats import formats_of

    layout = family.layout
    served = served_by(family.name)
    return {
        "family": family.name,
        "models": family.title,
        "model_types": list(family.model_types),
        "modules": family.default_modules,
        "count_field": family.count_field,
        "fuse_order": layout.fuse_order,
        "zero_centred_norms": layout.zero_centred_norms,
        "trunk_hidden": layout.trunk_hidden,
        "recycled_hidden": layout.recycled_hidden,
        "topology": layout.topology,
        "files": "complete" if family.is_complete else "known",
        "formats": formats_of(family),
        **_runs(family),
        "engines": {name: entry.since for name, entry in served.items()},
        "engines_with_plugin": [name for name, entry in served.items() if entry.is_apart],
        "published": family.is_published,
        "engine_notes": [
            f"{ENGINE_TITLES.get(name, name)}: {entry.note}"
            for name, entry in served.items()
            if entry.note
        ]
        + [
            f"{ENGINE_TITLES[caution.engine]}{caution.releases()}: {caution.text}"
            for caution in family.cautions
        ]
        + [f"also drafts with it: {program}" for program in family.elsewhere],
        "deviations": {name: dict(changes) for name, changes in layout.deviations.items()}
        | {f"{name} before {end}": dict(old) for name, (end, old) in layout.former.items()},
        "disputed": family.disputed or None,
        "notes": [*([f"not settled: {family.disputed}"] if family.disputed else []), *family.notes],
    }


def _runs(family: Family) -> dict[str, Any]:
    """What the embedded engine does with it; training and scoring run what it runs."""
    found = family.runtime
    others = set(family.model_types) - set(family.run_types)
    how = "no" if found is None else "partly" if others else "yes"
    kernels = "no" if found is None else "kernels" if found.has_gpu_kernels else "plain"
    return {
        "engine_cpu": how,
        "engine_gpu": kernels,
        "training": how,
        "engine_types": list(family.run_types),
        "engine_lacks": family.engine_lacks,
    }


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Three tables with a row a family, as in docs/families.md: models, contract, what runs it."""
    tables: dict[tuple[str, ...], list[tuple[str, ...]]] = {
        ("models", "modules", "files"): [],
        ("fuse", "state fed / recycled"): [],
        ("engine on CPU, training", "on GPU", "other engines (since)"): [],
    }
    models, contract, runs = tables.values()
    for row in rows:
        norms = ", norms 1+w" if row["zero_centred_norms"] else ""
        states = f"{row['trunk_hidden']} / {row['recycled_hidden']}".replace("_", " ")
        chain = "" if row["topology"] == "recursive" else f" {row['topology']}"
        models.append((row["models"], f"{row['modules']}{chain}", row["files"]))
        contract.append((f"{row['fuse_order'].replace('_', ' ')}{norms}", states))
        # Training runs what the engine on a CPU runs.
        runs.append((row["engine_cpu"], row["engine_gpu"], ", ".join(_engines(row)) or "-"))
    return "\n\n".join(_table(rows, titles, cells) for titles, cells in tables.items())


def _table(
    rows: list[dict[str, Any]], titles: tuple[str, ...], cells: list[tuple[str, ...]]
) -> str:
    lines = [f"| family | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    lines += [
        f"| `{row['family']}` | {' | '.join(own)} |" for row, own in zip(rows, cells, strict=True)
    ]
    return "\n".join(lines)


def short_table(rows: list[dict[str, Any]]) -> str:
    """The README's table: families that everything here can do; the others by name."""
    lines = ["| family | models | modules | served by |", "|---|---|---|---|"]
    complete = [row for row in rows if row["files"] == "complete"]
    ways = {row["family"]: (row["engine_cpu"], row["engine_gpu"], row["training"]) for row in rows}
    whole = [row for row in complete if ways[row["family"]] == ("yes", "kernels", "yes")]
    for row in whole:
        engines = ", ".join(_engines(row, with_release=False)) or "Headstart"
        lines.append(f"| `{row['family']}` | {row['models']} | {row['modules']} | {engines} |")
    plain = [row for row in complete if ways[row["family"]] == ("yes", "plain", "yes")]
    partly = [row for row in complete if row["engine_cpu"] == "partly"]
    files = [row for row in complete if row["engine_cpu"] == "no"]
    for start, named in (
        ("The same, but plain PyTorch on GPUs", plain),
        ("Some of their model types", partly),
        ("Files and launching only", files),
    ):
        names = ", ".join(f"`{row['family']}`" for row in named)
        text = wrap(f"{start}: {names}.", _WIDTH, break_on_hyphens=False)
        lines += ["", *text] if named else []
    return "\n".join(lines)


def _engines(row: dict[str, Any], *, with_release: bool = True) -> list[str]:
    """The engines that serve its head, and which of them with our plugin."""
    return [
        " ".join(
            [name, *([since] if with_release else [])]
            + (["(with plugin)"] if name in row["engines_with_plugin"] else [])
        )
        for name, since in row["engines"].items()
    ]


def _formats(row: dict[str, Any]) -> str:
    """The formats that carry its heads; why others do not is in the JSON and in docs/formats.md."""
    return ", ".join(name for name, why_not in row["formats"].items() if not why_not)


def _show(rows: list[dict[str, Any]]) -> None:
    from headstart.cli.look import console_of, table_of

    titles = (
        "family", "models", "modules", "files", "formats", "CPU", "GPU", "training",
        "engines (since)",
    )  # fmt: skip
    table = table_of(titles, left=titles)
    for column in table.columns:
        is_list = column.header in ("models", "formats", "engines (since)")  # others are words
        column.overflow, column.no_wrap = "fold", not is_list
    for row in rows:
        engines = ", ".join(_engines(row))
        colour = "green" if row["files"] == "complete" else "yellow"
        table.add_row(
            row["family"], row["models"], str(row["modules"]),
            f"[{colour}]{row['files']}[/]", _formats(row), row["engine_cpu"], row["engine_gpu"],
            row["training"], engines or "-",
        )  # fmt: skip
    console = console_of()
    console.print(table)
    for row in rows:
        if row["files"] == "complete" and row["engine_lacks"]:
            console.print(f"{row['family']}: the engine lacks {row['engine_lacks']}.")
