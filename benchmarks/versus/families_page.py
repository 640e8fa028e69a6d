"""What a run of all families says: a line for each, and a page of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from versus.quantized_page import why

Document = Mapping[str, Any]
_HEAD = """| checkpoint | K | what | ours | vLLM | ours to vLLM | times the floor, ours / vLLM |
|---|---|---|---|---|---|---|"""


def summary(document: Document) -> str:
    """Ratios by K and requests, above 1 where ours is faster, and how much failed."""
    parts = [f"K={row['k']} {what(row)} {ratio(row) or '-'}" for row in document["rows"]]
    failures = len(document["failures"])
    return ", ".join(parts) + (f"; {failures} failed" if failures else "")


def what(row: Mapping[str, Any]) -> str:
    return f"first {row['prompt']}" if row["stage"] == "first" else str(row["requests"])


def ratio(row: Mapping[str, Any]) -> str:
    """How many times as fast ours is; nothing where one of them is missing."""
    ours, theirs = (speed(row, engine) for engine in ("headstart", "vllm"))
    return f"{ours / theirs:.2f}x" if ours and theirs else ""


def speed(row: Mapping[str, Any], engine: str) -> float | None:
    """Tokens per second, or first tokens per second."""
    own = row["engines"].get(engine)
    if not own:
        return None
    if row["stage"] == "first":
        return 1 / float(own["first_token_seconds"]["value"])
    return float(own["value"])


def page(documents: Mapping[str, Document]) -> str:
    """All rows, then of each checkpoint its conditions, what vLLM's log says, and what failed."""
    lines = [_HEAD]
    for name, document in documents.items():
        lines += [_line(name, row) for row in document["rows"]]
    for name, document in documents.items():
        lines += ["", *_about(name, document)]
    return "\n".join(lines)


def _line(name: str, row: Mapping[str, Any]) -> str:
    cells = [name, str(row["k"]), what(row)]
    is_first = row["stage"] == "first"
    speeds = [speed(row, engine) for engine in ("headstart", "vllm")]
    for engine, found in zip(("headstart", "vllm"), speeds, strict=True):
        if found is None:
            cells.append("-")
            continue
        shown = f"{1e3 / found:.0f} ms" if is_first else f"{found:.0f}"
        settled = row["engines"][engine].get("is_settled", True)
        cells.append(shown + ("" if settled else " (not settled)"))
    floor = row.get("floor")
    shares = [f"{floor / own:.2f}" if floor and own else "-" for own in speeds]
    cells += [ratio(row) or "-", " / ".join(shares)]
    return f"| {' | '.join(cells)} |"


def _about(name: str, document: Document) -> list[str]:
    if "checkpoint" not in document:
        return [f"{name}: {'; '.join(document['failures']) or 'written'}"]
    engines = ", ".join(
        f"{engine} {own.get('version')}" for engine, own in document["engines"].items()
    )
    needs, facts = document.get("needs", {}), document["checkpoint"]
    size = f"{needs['weights'] / 1e9:.1f} GB, " if needs else ""
    lines = [
        f"{name}: {facts['shape']}, {size}rate {facts['rate']}; {document['device']}, "
        f"{document['date']}, {engines}"
    ]
    starts = [f"{s['engine']} K = {s['k']} {s['start_seconds']:.0f} s" for s in document["starts"]]
    lines += [f"- starts: {', '.join(starts)}"] if starts else []
    kernels = document["engines"].get("vllm", {}).get("kernels", [])
    lines += [f"- vLLM: {line}" for line in kernels]
    lines += [f"- note: {note}" for note in document.get("notes", [])]
    where = [(part.partition("\n")[0][:120], why(part)) for part in document["failures"]]
    return lines + [f"- failed: {first} ... {last}" for first, last in where]
