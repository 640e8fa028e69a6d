"""Rows as a Markdown table and as one JSON document, written after every row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NONE = "-"


def markdown(document: dict[str, Any]) -> str:
    """One line per row: `a / b` are the engines in their order."""
    names: list[str] = list(document["engines"])
    head = [
        "kind", "load", f"tokens/s {' / '.join(names)}", "ratio", "of own greedy",
        "acceptance length", "first token p50 ms", "p99 ms", "per token p50 ms", "p99 ms",
        "round ms", "client",
    ]  # fmt: skip
    lines = [
        f"# Over HTTP, {document['date'][:10]}", "", f"`{document['command']}`", "",
        f"{document['device']}; {document['checkpoint']}. Acceptance length: of rounds that "
        "drafted. Round: of one request, where the server counts rounds. Client: share of a "
        "processor that it used.", "",
        "| " + " | ".join(head) + " |", "|" + "---|" * len(head),
    ]  # fmt: skip
    lines += [line(row, names, document["rows"]) for row in document["rows"]]
    for name, found in document["engines"].items():
        if found.get("start_seconds") is not None:
            lines += ["", f"{name}: /health said 200 after {found['start_seconds']:.1f} s."]
        if "first" in (first := found.get("first_requests", {})):
            each = ", ".join(f"{1e3 * value:.1f}" for value in first["first"])
            lines += ["", f"{name}: first token of the first eight requests {each} ms, of the "
                      f"hundredth {1e3 * first['hundredth']:.1f} ms (median of the last five "
                      f"{1e3 * first['last_five_p50']:.1f} ms)."]  # fmt: skip
    lines += ["", *(f"- not measured or failed: {text}" for text in document["failures"])]
    return "\n".join(lines).rstrip() + "\n"


def line(row: dict[str, Any], names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    found = [row["engines"].get(name, {}) for name in names]
    greedy: dict[str, Any] = next(
        (r for r in rows if r["kind"] == "greedy" and r["load"] == row["load"]), {"engines": {}}
    )
    own = [
        _ratio(figures.get("tokens_per_second"),
               greedy["engines"].get(name, {}).get("tokens_per_second"))
        for name, figures in zip(names, found, strict=True)
    ]  # fmt: skip
    speeds = [figures.get("tokens_per_second") for figures in found]
    cells = [
        row["kind"], row["load"], _each(speeds, "{:.0f}"),
        _shown(_ratio(speeds[0], speeds[1]) if len(speeds) > 1 else None, "{:.2f}"),
        _each(own, "{:.2f}"),
        _each([figures.get("acceptance_length") for figures in found], "{:.2f}"),
    ]  # fmt: skip
    for name in ("first_token_seconds", "token_seconds"):
        for part in ("p50", "p99"):
            values = [figures.get(name, {}).get(part) for figures in found]
            cells.append(_each([_times(value, 1e3) for value in values], "{:.2f}"))
    rounds = [_times(figures.get("round_seconds"), 1e3) for figures in found]
    cells += [_each(rounds, "{:.2f}"), _each([f.get("client_share") for f in found], "{:.2f}")]
    failed = sum(figures.get("failed", 0) for figures in found)
    if failed:
        cells[0] += f" ({failed} requests failed)"
    return "| " + " | ".join(cells) + " |"


def write(document: dict[str, Any], out: Path | None) -> None:
    """`out` is the JSON file; the table lies beside it."""
    if out is None:
        return
    out.write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(document))


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _times(value: float | None, factor: float | None) -> float | None:
    return value * factor if value is not None and factor is not None else None


def _shown(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


def _each(values: Sequence[float | None], form: str) -> str:
    return " / ".join(_shown(value, form) for value in values)
