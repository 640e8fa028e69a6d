"""Stage `publish` of the wider recipe: the head in bf16, its draft vocabulary and its card."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from collect import PACKAGES
from publish import write_folder
from scores import lines, table
from wide_evaluation import FINAL, SHIPPED
from wide_settings import Wide
from wide_text import MODEL, read_lines
from wide_text import PACKAGES as TASKS
from wide_training import chosen

CARD = Path(__file__).parent / "wide_card.md"


def publish(settings: Wide, out: Path) -> None:
    """Write `out`, a folder to ship."""
    program = "recipes/demo_head/wide.py publish"
    write_folder(settings.final, settings.vocab, card(settings), out, program)


def card(settings: Wide) -> str:
    """The model card: what is in wide_card.md, and what was measured."""
    header = json.loads((settings.answers / "dataset.json").read_text())
    counts = header["counts"]["train"]
    found = [
        line for line in lines(settings.work / "scores.jsonl") if line["head"] in (SHIPPED, FINAL)
    ]
    text = CARD.read_text().format(
        records=counts["records"], tokens=counts["answer_tokens"],
        temperatures=", ".join(f"{t:g}" for t in header["report"]["temperatures"]),
        sources=_sources(settings), packages=_packages(), options=json.dumps(_options(settings)),
        scores=table(found).rstrip() if found else "not scored yet", vocab=settings.vocab_size,
    )  # fmt: skip
    return _wrapped(text)


def _options(settings: Wide) -> dict[str, Any]:
    path = settings.work / "long" / "options.json"
    own = json.loads(path.read_text())["options"] if path.is_file() else chosen(settings)
    names = (
        "context", "loss", "num_depths", "optimizer", "learning_rate", "schedule", "average",
        "max_steps", "batch_tokens",
    )  # fmt: skip
    return {name: own.get(name) for name in names}


def _sources(settings: Wide) -> str:
    """Prompts by where they come from."""
    people: Counter[tuple[str, str]] = Counter()
    if settings.prompts is not None:
        for line in read_lines(settings.prompts):
            people[str(line.get("source", "unnamed")), str(line.get("licence", "not stated"))] += 1
    given = json.loads(settings.sources.read_text()) if settings.sources.is_file() else {}
    counts = given.get("prompts", {})
    rows = [f"| {name} | {licence} | {count} |" for (name, licence), count in people.most_common()]
    if MODEL in counts:
        rows.append(f"| the model itself | Apache-2.0 | {counts[MODEL]} |")
    if TASKS in counts:
        rows.append(f"| tasks made of passages of packages | see below | {counts[TASKS]} |")
    return "\n".join(["| prompts from | licence | number |", "|---|---|---|", *rows])


def _packages() -> str:
    """Packages by licence; versions and digests are in packages.json of the recipe."""
    by_licence: dict[str, list[str]] = {}
    entries = [e for e in json.loads(PACKAGES.read_text()) if e.get("passages")]
    for entry in entries:
        by_licence.setdefault(entry["licence"], []).append(entry["name"])
    ordered = sorted(by_licence.items(), key=lambda pair: -len(pair[1]))
    parts = [f"{', '.join(names)} ({licence})" for licence, names in ordered]
    return "; ".join(parts)


def _wrapped(text: str) -> str:
    """As the project's documents are: no line above 120 characters but in tables."""
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith("|") else textwrap.fill(line, 119, break_on_hyphens=False)
        for line in lines
    )
