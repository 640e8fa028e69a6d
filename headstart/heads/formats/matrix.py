"""Which format carries the heads of which family, asked of the formats themselves."""

from __future__ import annotations

from textwrap import fill

from headstart.families.base import Family
from headstart.families.registry import families
from headstart.heads.formats import WRITTEN, format_named

_WIDTH = 120


def formats_of(owner: Family) -> dict[str, str]:
    """Every format, with why it does not carry heads of the family; empty where it does."""
    return {name: format_named(name).why_not(owner) for name in WRITTEN}


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
        lines.append(fill(f"{number}. {reason}", _WIDTH, subsequent_indent="   "))
    lines += ["", "What comes back with every bit: everything but", ""]
    lines += [f"- `{name}`: {format_named(name).LOSES or 'nothing is lost'}" for name in WRITTEN]
    return "\n".join(lines)
