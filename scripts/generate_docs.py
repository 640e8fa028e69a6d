"""Writes what can be generated: docs/{cli,errors,families,formats,metrics}.md, README's table.

python scripts/generate_docs.py          rewrites the files
python scripts/generate_docs.py --check  fails if one of them differs (tests/test_docs.py does this)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

import headstart.errors
from headstart.cli.commands import EXAMPLES, TASKS
from headstart.cli.families import family_rows, markdown_table, short_table
from headstart.cli.main import build_command
from headstart.families.drafters import DRAFTERS
from headstart.families.registry import GRAFTED_AS, families
from headstart.heads.formats import WRITTEN, format_named, formats_of
from headstart.server.metrics.table import GROUPS, Metric

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120


def documents() -> dict[Path, str]:
    """Every generated file with its text."""
    readme = ROOT / "README.md"
    return {
        readme: _filled(readme, "families", short_table(family_rows())),
        ROOT / "docs/families.md": families_page(),
        ROOT / "docs/formats.md": _filled(ROOT / "docs/formats.md", "formats", matrix_page()),
        ROOT / "docs/cli.md": cli_page(),
        ROOT / "docs/errors.md": errors_page(),
        ROOT / "docs/metrics.md": metrics_page(),
    }


def _filled(path: Path, name: str, text: str) -> str:
    """A page whose part between two marks is generated."""
    begin, end = f"<!-- {name}: generated -->", f"<!-- /{name} -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def _wrapped(paragraph: str, indent: str = "") -> str:
    """The same words in lines that are not too long."""
    if all(len(line) <= WIDTH for line in paragraph.splitlines()):
        return paragraph
    return fill(
        paragraph, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def matrix_page() -> str:
    """The table of docs/formats.md: one row a family, reasons by number below."""
    reasons: list[str] = []
    lines = [
        f"| family | {' | '.join(WRITTEN)} |",
        f"|---|{'---|' * len(WRITTEN)}",
    ]
    for owner in sorted(families(), key=lambda each: each.name):
        cells = []
        for reason in formats_of(owner).values():
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else "yes")
        lines.append(f"| `{owner.name}` | {' | '.join(cells)} |")
    lines += ["", "Not carried, because:", ""]
    for number, reason in enumerate(reasons, 1):
        lines.append(fill(f"{number}. {reason}", WIDTH, subsequent_indent="   "))
    lines += ["", "What comes back with every bit: everything but", ""]
    lines += [f"- `{name}`: {format_named(name).LOSES or 'nothing is lost'}" for name in WRITTEN]
    return "\n".join(lines)


def families_page() -> str:
    rows = family_rows()
    lines = [
        "# Families",
        "",
        "Generated from the registry (`headstart families --markdown`). `complete`: all file",
        "operations, with a fixture of the real names and a tiny checkpoint in the tests; `known`:",
        "facts and names are in the registry and the head is found and carried as it is.",
        "Engine and training: what Headstart itself runs. On GPUs `kernels` are the fused ones,",
        "`plain` is PyTorch as on the CPU; `partly`: some of the family's model types.",
        "",
        "`headstart graft` makes a fresh head, to be trained, for a model that has none: one of a",
        "complete family, or "
        + " or ".join(f"`{kind}` (as `{layout}`)" for kind, layout in GRAFTED_AS.items())
        + ".",
        "",
        markdown_table(rows),
        "",
        "## Where engines depart from this, and what else to know",
        "",
    ]
    for row in rows:
        said = [
            f"{engine}: " + ", ".join(f"{key} = {value}" for key, value in changes.items())
            for engine, changes in row["deviations"].items()
        ]
        lacks = [f"the engine lacks {row['engine_lacks']}"] if row["engine_lacks"] else []
        for text in [*said, *lacks, *row["notes"], *row["engine_notes"]]:
            lines.append(_wrapped(f"- `{row['family']}`: {text}", indent="  "))
    lines += ["", "## Drafters that are no heads", ""]
    for drafter in DRAFTERS:
        ways = "; ".join(
            f"{name} {since}: `{drafter.flags(name, {}, 'DRAFTER')}`"
            for name, (since, _) in drafter.served.items()
        )
        text = (
            f"- {drafter.name}: named by `inspect`, opaque to all operations (`export`, `convert`, "
            f"`stitch` and `graft` refuse it). {ways}"
        )
        lines.append(_wrapped(text, indent="  "))
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    lines = [
        "# Command line",
        "",
        "Generated from the commands themselves. `headstart --install-completion` lets your shell "
        "complete",
        "commands, options and their values.",
        "",
    ]
    for task, commands in TASKS.items():
        lines += [f"## {task}", ""]
        for name, purpose in commands.items():
            command = build_command(name)
            subcommands = getattr(command, "commands", None)
            if subcommands is None:
                lines += _command_lines(name, purpose, command)
                continue
            for subcommand, own in subcommands.items():
                lines += _command_lines(f"{name} {subcommand}", own.help, own)
    return "\n".join(lines)


def _command_lines(name: str, purpose: str, command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(_argument(p) for p in arguments)
    lines = [f"### headstart {name} {usage}".rstrip(), "", purpose, "", "```bash"]
    for line, said in EXAMPLES[name].items():
        whole = f"{line}   # {said}"
        lines += [whole] if len(whole) <= WIDTH else [f"# {said}:", line]
    lines += ["```", ""]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    return [*lines, *map(_option, options), ""] if options else lines


def _argument(parameter: Any) -> str:
    name = parameter.metavar or str(parameter.name).upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _option(parameter: Any) -> str:
    flags = " / ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
    facts = ["required"] if parameter.required else []
    if parameter.default not in (None, False, "", ()):
        facts.append(f"default `{parameter.default}`")
    note = f" ({', '.join(facts)})" if facts else ""
    return _wrapped(f"- {flags}{note}: {parameter.help or ''}", indent="  ")


def errors_page() -> str:
    doc = headstart.errors.__doc__ or ""
    tree = doc.split("\n\n")[1]
    return (
        "# Errors\n\nGenerated from `headstart/errors.py`. The command line prints an error as one "
        "line and exits with 1;\nmisuse of options exits with 2.\n\n```\n" + tree + "\n```\n"
    )


def metrics_page() -> str:
    """The lists behind a written part, whose paragraphs are wrapped."""
    page = _filled(ROOT / "docs/metrics.md", "metrics", metrics_lists())
    written, mark, tables = page.partition("<!--")
    paragraphs = [
        part if part.lstrip().startswith("|") else _wrapped(part) for part in written.split("\n\n")
    ]
    return "\n\n".join(paragraphs) + mark + tables


def metrics_lists() -> str:
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += [f"## {title}", "", *(_metric(metric) for metric in group), ""]
    return "\n".join(lines)


def _metric(metric: Metric) -> str:
    names = ", ".join(f"`{name}`" for name in metric.exposed)
    labels = ", ".join(f"`{label}`" for label in metric.label_names)
    kind = f"{metric.kind} by {labels}" if labels else metric.kind
    return _wrapped(f"- {names} ({kind}): {metric.help}", indent="  ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in documents().items() if _differs(path, text)]
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"{names}: not as generated; run scripts/generate_docs.py", file=sys.stderr)
        return 1
    for path, text in documents().items():
        path.write_text(text)
    return 0


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text() != text


if __name__ == "__main__":
    sys.exit(main())
