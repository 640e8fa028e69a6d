"""Tables of task suites, made from the document; the first row has the heads."""

from __future__ import annotations

from typing import Any

from headstart.bench.rows import Rows, rates, speed_up
from headstart.bench.tasks import ALL, mean_rows


def task_table(document: dict[str, Any]) -> Rows:
    rows: Rows = [["task", "category", "method", "tokens/s", "acceptance length", "cumulative",
             "conditional", "speed-up"]]  # fmt: skip
    for row in document["tasks"]:
        rows.append([
            row["task"], row["category"], row["variant"], row["tokens_per_second"],
            row["acceptance_length"], rates(row["cumulative_acceptance"]),
            rates(row["conditional_acceptance"]), speed_up(row),
        ])  # fmt: skip
    return rows


def fastmtp_table(document: dict[str, Any]) -> Rows:
    """A row a method, a column a task: acceptance length / tokens per second, as FastMTP has it."""
    whole = [row for row in document["tasks"] if row["category"] == ALL]
    tasks = list(dict.fromkeys(row["task"] for row in whole))
    if len(tasks) < 2:
        return []
    rows: Rows = [["method", *tasks, "mean", "speed-up"]]
    for mean in mean_rows(document["tasks"], document["base"]):
        own = {row["task"]: row for row in whole if row["variant"] == mean["variant"]}
        cells = [_pair(own[task]) if task in own else None for task in tasks]
        rows.append([mean["variant"], *cells, _pair(mean), mean["speed_up"]])
    return rows


def _pair(row: dict[str, Any]) -> str:
    speed, length = f"{row['tokens_per_second']:.2f}", row["acceptance_length"]
    return speed if length is None else f"{length:.2f} / {speed}"
