"""Results of `gpu_vs_vllm.py` as one document and one page.

python benchmarks/versus/report.py first.json [second.json ...]   # one page from several runs
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LATENCIES = (
    ("first_token_seconds", "first token of {prompt} tokens, idle"),
    ("long_first_token_seconds", "first token of {long} tokens, {decoding} decoding"),
    ("quiet.chunk_p50_seconds", "gap between chunks, {decoding} decoding alone: p50"),
    ("during.chunk_p50_seconds", "gap between chunks, {decoding} decoding beside {long}: p50"),
    ("during.chunk_max_seconds", "gap between chunks, {decoding} decoding beside {long}: max"),
    ("during.token_p50_seconds", "gap per token, {decoding} decoding beside {long}: p50"),
    ("during.token_mean_seconds", "gap per token, {decoding} decoding beside {long}: mean"),
)


def write_json(document: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a run may be ended at any time."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(partial, path)


def page(documents: Sequence[dict[str, Any]]) -> str:
    """Conditions of every run, then all their rows in one table each of speed and latency."""
    lines = ["# The engine beside vLLM on one host", ""]
    for document in documents:
        lines += [*_conditions(document), ""]
    rows = [row for document in documents for row in document["rows"]]
    lines += _speeds([row for row in rows if row["stage"] in ("answer", "off", "vocab")])
    lines += _times([row for row in rows if row["stage"] in ("first", "long")])
    lines += _starts(documents)
    for document in documents:
        lines += [f"- note: {note}" for note in document["notes"]]
        lines += [f"- failed: {_short(failure)}" for failure in document["failures"]]
    return "\n".join(lines) + "\n"


def _conditions(document: dict[str, Any]) -> list[str]:
    sizes, checkpoint = document["sizes"], document["checkpoint"]
    engines = ", ".join(
        f"{name} {facts['version']} (torch {facts['torch']})"
        for name, facts in document["engines"].items()
    )
    logits = document.get("logits")
    checked = f"{logits['summary']}. " if logits else ""
    return [
        f"{document['device']}, {document['date']}; {engines}.",
        "",
        f"    {document['command']}",
        "",
        f"Calibrated checkpoint {checkpoint['shape']}, rate {checkpoint['rate']}, "
        f"{checkpoint['active']} tokens in use; prompts of {sizes['prompt']} and answers of "
        f"{sizes['answer']} tokens, all requests at once; {sizes['repeats']} repeats in "
        f"alternation, medians. {checked}Every answer was checked against the cycle that the trunk "
        "walks.",
    ]


def _speeds(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "Output tokens per second, prefill included:", "",
        "| K | requests | headstart | vLLM | ours / theirs | spread | note |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    notes = {"off": "started with drafts, switched off per request", "answer": ""}
    for row in rows:
        note = notes.get(row["stage"], f"draft vocabulary of {row.get('draft_vocab')} tokens")
        ours, theirs = row["engines"].get("headstart", {}), row["engines"].get("vllm", {})
        spread = " / ".join(f"{_spread(found):.1f} %" for found in (ours, theirs) if found)
        cells = [row["k"], row["requests"]]
        cells += [f"{found['value']:.0f}" if found else "-" for found in (ours, theirs)]
        lines.append(_line([*cells, _ratio(ours, theirs), spread, note]))
    return [*lines, ""]


def _times(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "Latency in milliseconds, lower is better; a chunk is what one step gives a request:", "",
        "| K | what | headstart | vLLM | ours / theirs |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        for key, words in _LATENCIES:
            found = [row["engines"].get(name, {}).get(key) for name in ("headstart", "vllm")]
            if not any(found):
                continue
            cells = [f"{each['value'] * 1e3:.1f}" if each else "-" for each in found]
            what = words.format(**{n: row.get(n) for n in ("prompt", "long", "decoding")})
            lines.append(_line([row["k"], what, *cells, _ratio(*(each or {} for each in found))]))
    return [*lines, ""]


def _starts(documents: Sequence[dict[str, Any]]) -> list[str]:
    starts = [
        {**start, "page_cache": document["page_cache"]}
        for document in documents
        for start in document["starts"]
    ]
    if not starts:
        return []
    lines = [
        "Process start to first token of a short prompt, checkpoint in page cache (read just "
        "before, or only assumed to be there):", "",
        "| K | engine | seconds | note |", "|---|---|---|---|",
    ]  # fmt: skip
    for start in starts:
        found = start["caches_found"]
        notes = ["both starting at once"] if start["is_overlapped"] else []
        if start["draft_vocab"]:
            notes.append(f"draft vocabulary of {start['draft_vocab']} tokens")
        notes.append(f"compile cache {'found' if found else 'empty'}")
        notes.append(f"page cache {start['page_cache']}")
        row = [start["k"], start["engine"], f"{start['start_seconds']:.1f}", ", ".join(notes)]
        lines.append(_line(row))
    return [*lines, ""]


def _short(failure: str) -> str:
    """Where and why: the first and the last line of what may hold a log."""
    lines = failure.strip().splitlines()
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return f"{ours['value'] / theirs['value']:.2f}x" if ours and theirs else "-"


def _spread(found: dict[str, Any]) -> float:
    """Largest minus smallest, in percent of the median."""
    return float(100 * (max(found["all"]) - min(found["all"])) / found["value"])


if __name__ == "__main__":
    print(page([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
