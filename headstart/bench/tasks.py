"""Task suites: speed, acceptance and speed-up of each task and category, as FastMTP's table.

A task is a file of questions. Speed is output tokens over the time of the requests, the reading of
the prompt included. The acceptance of a category is known where answers carry their own counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.bench.cells import Cell
from headstart.bench.facts import Facts
from headstart.bench.measures import latency_seconds
from headstart.bench.records import RequestRecord, Speculation, VariantRecord
from headstart.bench.response_counters import total_speculation
from headstart.bench.statistics import Sample, ratio
from headstart.bench.sweep import is_comparable
from headstart.bench.workload import Workload, WorkloadOptions, make_workload
from headstart.errors import ConfigError

ALL = "all"


def task_workloads(
    files: Sequence[Path], *, num_questions: int | None, max_tokens: int, temperature: float,
    seed: int, facts: Facts,
) -> dict[str, Workload]:  # fmt: skip
    """By task, which is named as its file; the first questions of each."""
    found: dict[str, Workload] = {}
    for file in files:
        name = file.stem if file.stem != "question" else file.parent.name or file.stem
        if name in found:
            raise ConfigError(
                f"two files make the task {name!r}: rename {file}, or put it into another folder."
            )
        options = WorkloadOptions(
            prompts=file, output_tokens=str(max_tokens), temperature=temperature, seed=seed,
            api=facts.api,
        )  # fmt: skip
        whole = make_workload(options, facts.vocabulary, notes=facts.notes)
        if num_questions is not None and num_questions > len(whole.questions):
            raise ConfigError(
                f"--num-questions is {num_questions} and {file} has {len(whole.questions)}; give "
                "fewer, or leave it out for all."
            )
        found[name] = replace(whole, questions=whole.questions[:num_questions])
    return found


def task_rows(task: str, cells: Sequence[Cell], base: str) -> list[dict[str, Any]]:
    """One row for each variant and category, and one for all categories together."""
    by_name = {cell.variant: cell for cell in cells}
    categories = list(dict.fromkeys(r.category for cell in cells for _, r in cell.requests))
    wanted = [ALL] if len(categories) < 2 else [ALL, *categories]
    return [_row(task, category, cell, by_name.get(base)) for category in wanted for cell in cells]


def _row(task: str, category: str, cell: Cell, base: Cell | None) -> dict[str, Any]:
    own = _of(cell, category)
    tokens = sum(request.output_tokens for _, request in own)
    seconds = sum(latency_seconds(request) or 0.0 for _, request in own)
    faster = None
    if base is not None and cell is not base:
        faster = ratio(_samples(_of(base, category)), _samples(own))
    counted = _counted(cell, own, category)
    return {
        "task": task,
        "category": category,
        "variant": cell.variant,
        "requests": len(own),
        "output_tokens": tokens,
        # Per stream: with several at once the server's throughput is as many times that.
        "tokens_per_second": tokens / seconds if seconds else None,
        "acceptance_length": None if counted is None else counted.acceptance_length,
        "cumulative_acceptance": [] if counted is None else list(counted.cumulative),
        "conditional_acceptance": [] if counted is None else list(counted.conditional),
        "speed_up": None if faster is None else faster.as_json(),
        "comparable": base is None or is_comparable(base.cached_share, cell.cached_share),
    }


def _of(cell: Cell, category: str) -> list[tuple[int, RequestRecord]]:
    return [pair for pair in cell.requests if category in (ALL, pair[1].category)]


def _samples(requests: Sequence[tuple[int, RequestRecord]]) -> list[Sample]:
    return [
        Sample(request.id, repeat, request.output_tokens, seconds)
        for repeat, request in requests
        if (seconds := latency_seconds(request)) is not None
    ]


def _counted(
    cell: Cell, own: Sequence[tuple[int, RequestRecord]], category: str
) -> Speculation | None:
    if category == ALL and cell.speculation is not None:
        return cell.speculation
    return total_speculation(request.speculation for _, request in own)


def answer_lines(task: str, records: Sequence[VariantRecord]) -> list[dict[str, Any]]:
    """What every variant wrote in its first repeat, a line for each conversation."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for request in (r for run in record.runs if run.repeat == 0 for r in run.requests):
            line = lines.setdefault(
                (record.name, request.conversation),
                {
                    "task": task, "question_id": request.conversation, "category": request.category,
                    "variant": record.name, "turns": [], "output_tokens": [], "seconds": [],
                    "failure": None,
                },
            )  # fmt: skip
            line["turns"].append(request.text)
            line["output_tokens"].append(request.output_tokens)
            line["seconds"].append(request.end_seconds - request.sent_seconds)
            if request.failure is not None:
                line["failure"] = f"{request.failure.kind}: {request.failure.words}"
    return list(lines.values())


def mean_rows(rows: Sequence[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Over tasks, each with the same weight; the speed-up is that of the mean speeds."""
    whole = [row for row in rows if row["category"] == ALL and row["tokens_per_second"]]
    speeds: dict[str, list[float]] = {}
    lengths: dict[str, list[float]] = {}
    for row in whole:
        speeds.setdefault(row["variant"], []).append(row["tokens_per_second"])
        if row["acceptance_length"] is not None:
            lengths.setdefault(row["variant"], []).append(row["acceptance_length"])
    apart = {row["variant"] for row in whole if not row.get("comparable", True)}
    means = {name: sum(values) / len(values) for name, values in speeds.items()}
    return [
        {
            "variant": name,
            "tokens_per_second": speed,
            "acceptance_length": (
                sum(lengths[name]) / len(lengths[name]) if name in lengths else None
            ),
            "speed_up": speed / means[base] if base in means and name not in apart else None,
        }
        for name, speed in means.items()
    ]
