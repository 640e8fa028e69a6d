"""Stage `publish` of the wider recipe: the head in bf16, its draft vocabulary and its card."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from collect import PACKAGES, read_passages
from publish import write_folder
from scores import current, digests_of, table
from wide_evaluation import scored_heads
from wide_settings import Wide
from wide_text import MODEL, PEOPLE, benchmarks_of, first_prompt, origin_of, read_lines
from wide_text import PACKAGES as TASKS
from wide_training import chosen

from headstart.data.conversations import read_conversations
from headstart.data.dataset import Dataset

CARD = Path(__file__).parent / "wide_card.md"
_UNNAMED = ("unnamed", "not stated")  # source and licence


def publish(settings: Wide, out: Path) -> None:
    """Write `out`, a folder to ship."""
    program = "recipes/demo_head/wide.py publish"
    write_folder(settings.final, settings.vocab, card(settings), out, program)


def card(settings: Wide) -> str:
    """The model card: what is in wide_card.md, and what was measured."""
    header = json.loads((settings.answers / "dataset.json").read_text())
    counts = header["counts"]["train"]
    digests = digests_of(scored_heads(settings))
    scored = current(settings.work / "scores.jsonl", digests)
    found = [line for line in scored if line["head"] in digests]
    records = Dataset.open(settings.answers).records("train")
    used = {first_prompt(record.prompt_id) for record in records}
    samples = sorted({record.sample for record in records})
    text = CARD.read_text().format(
        records=counts["records"], tokens=counts["answer_tokens"],
        temperatures=", ".join(f"{header['report']['temperatures'][i]:g}" for i in samples),
        benchmarks=_benchmarks(settings), sources=_sources(settings, used),
        packages=_packages(settings, used), options=json.dumps(_options(settings)),
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


def _benchmarks(settings: Wide) -> str:
    """What prompts were kept away from, as the stage `prompts` noted it."""
    names = benchmarks_of(settings)
    if names is None:
        return "Whether prompts were compared with questions of benchmarks was not noted."
    if not names:
        return "Prompts were not compared with questions of any benchmark."
    return f"Prompts near a question of these files were removed: {', '.join(names)}."


def _sources(settings: Wide, used: Collection[str]) -> str:
    """The prompts whose answers were trained on, by where they come from."""
    people = _people(settings)
    counts = Counter(origin_of(name, people) for name in used)
    by_source = Counter(people.get(n, _UNNAMED) for n in used if origin_of(n, people) == PEOPLE)
    rows = [f"| {name} | {licence} | {n} |" for (name, licence), n in by_source.most_common()]
    if MODEL in counts:
        rows.append(f"| the model itself | Apache-2.0 | {counts[MODEL]} |")
    if TASKS in counts:
        rows.append(f"| tasks made of passages of packages | see below | {counts[TASKS]} |")
    return "\n".join(["| prompts from | licence | number |", "|---|---|---|", *rows])


def _people(settings: Wide) -> dict[str, tuple[str, str]]:
    """Id -> source and licence of the prompts of people, as far as the file is given."""
    if settings.prompts is None:
        return {}
    both = zip(read_conversations(settings.prompts), read_lines(settings.prompts), strict=True)
    return {
        conversation.id: (
            str(line.get("source", _UNNAMED[0])), str(line.get("licence", _UNNAMED[1])),
        )
        for conversation, line in both
    }  # fmt: skip


def _packages(settings: Wide, used: Collection[str]) -> str:
    """The packages that tasks were made of, by licence; packages.json has versions and digests."""
    tasks = {name.partition("-")[0] for name in used if origin_of(name, ()) == TASKS}
    if not tasks:
        return "No passages of packages were used."
    if settings.passages is None:
        return "The packages are not named here: `publish` was run without `--passages`."
    licences = {entry["name"]: entry["licence"] for entry in json.loads(PACKAGES.read_text())}
    by_licence: dict[str, list[str]] = {}
    for name in sorted(
        {p.package for p in read_passages(settings.passages) if p.sha[:16] in tasks}
    ):
        by_licence.setdefault(licences.get(name, _UNNAMED[1]), []).append(name)
    ordered = sorted(by_licence.items(), key=lambda pair: -len(pair[1]))
    parts = "; ".join(f"{', '.join(names)} ({licence})" for licence, names in ordered)
    return (
        f"Passages came from the documentation and code of these Debian and PyPI packages: {parts}."
    )


def _wrapped(text: str) -> str:
    """As the project's documents are: no line above 120 characters but in tables."""
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith("|") else textwrap.fill(line, 119, break_on_hyphens=False)
        for line in lines
    )
