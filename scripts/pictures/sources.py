"""Which results the pictures show. After newer ones: change a name here, then run
`python scripts/make_pictures.py`; a test fails while pictures and results differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURES = ROOT / "benchmarks/results", ROOT / "docs/pictures"

# Of benchmarks/gpu_http.py, both servers in turns; a cell is of the first file that has it.
SPEED = (
    "gpu_http_h200_2026-11-18_second.json", "gpu_http_h200_2026-11-18.json",
    "gpu_http_h200_2026-11-17_c.json", "gpu_http_h200_2026-11-17_b.json",
)  # fmt: skip
STUDY = "demo_head_study_h200_2026-11-15.json"  # of recipes/demo_head
TERMINAL = "demo_terminal_2-cores_2026-11-18.json"  # of make_pictures.py --record terminal
PAGE = "chat_page_2-cores_2026-11-18.json"  # of make_pictures.py --record page

KINDS = {
    "greedy": "greedy",
    "temperature": "temperature",
    "json": "JSON schema",
    "tools": "tool calls",
}
STREAMS = (1, 8, 32, 128)
BEFORE, AFTER, ANSWERS = "stock", "final", "held-out, T=0"


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@dataclass(frozen=True)
class Speeds:
    """Output tokens per second of both servers, by kind of request and number of streams."""

    ours: dict[tuple[str, int], float]
    vllm: dict[tuple[str, int], float]
    where: str

    def ratio(self, kind: str, streams: int) -> float:
        return self.ours[kind, streams] / self.vllm[kind, streams]


def speeds(documents: Sequence[Any]) -> Speeds:
    """The cells that the chart shows; KeyError where one was not measured."""
    document = documents[0]
    facts = ("device", "checkpoint", "k")
    if any(each[fact] != document[fact] for each in documents for fact in facts):
        raise ValueError("results of other machines, checkpoints or K have no place in one chart")
    rows = {
        (row["kind"], row["load"]): row["engines"]
        for each in reversed(documents)
        for row in each["rows"]
    }
    found = {
        name: {
            (kind, streams): rows[kind, str(streams)][name]["tokens_per_second"]
            for kind in KINDS
            for streams in STREAMS
        }
        for name in ("ours", "vllm")
    }
    made, days = document["checkpoint"], sorted({each["date"][:10] for each in documents})
    where = (
        f"{document['device']}, {made['shape']} shape, K = {document['k']}, drafts right at "
        f"{made['rate']:.0%}, {' and '.join(days)}"
    )
    return Speeds(found["ours"], found["vllm"], where)


@dataclass(frozen=True)
class Tuning:
    """Cumulative acceptance by depth and acceptance length at K = 3, before and after."""

    before: list[float]
    after: list[float]
    lengths: tuple[float, float]
    answers: int


def tuning(document: Any) -> Tuning:
    rows = {
        score["head"]: score["all"]["draft vocabulary"]
        for score in document["scores"]
        if score["set"] == ANSWERS
    }
    before, after = rows[BEFORE], rows[AFTER]
    if before["answers"] != after["answers"]:
        raise ValueError(f"{BEFORE} and {AFTER} were scored on different answers")
    lengths = (before["length"][3], after["length"][3])
    return Tuning(before["cumulative"], after["cumulative"], lengths, before["answers"])
