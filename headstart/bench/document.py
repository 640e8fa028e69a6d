"""The result of a benchmark as one JSON document; docs/benchmarking.md explains every field.

Whatever is shown (table, page, `bench diff`) is made from this document, so that a saved result can
be looked at again. VERSION rises when a reader of the older form would misread the newer one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headstart.bench.advice import advice
from headstart.bench.cells import Cell, make_cells
from headstart.bench.cost import Prices
from headstart.bench.environment import environment
from headstart.bench.measures import Limits
from headstart.bench.records import RunRecord, VariantRecord
from headstart.bench.statistics import FEWEST_REPEATS
from headstart.bench.study import Study
from headstart.bench.sweep import Comparison, compare_cells, crossovers
from headstart.bench.tasks import task_rows
from headstart.bench.variants import Variant
from headstart.checkpoint.local_paths import shown
from headstart.documents import misfit, parse_json
from headstart.errors import DataError
from headstart.files import read_plain, why_unreadable

FORMAT, VERSION = "headstart-bench", 1
RESULT_NAME, PAGE_NAME = "bench.json", "report.html"
# What a saved result must hold to be compared with another one.
_OBJECT = dict[str, Any]
_DOCUMENT = {
    "environment": _OBJECT, "workload": _OBJECT, "is_valid": bool, "cells": list[_OBJECT],
}  # fmt: skip
_SPREAD = float | dict[str, float | None] | None
_CELL = {
    "variant": str, "task": str | None, "concurrency": int | None, "rate": float | None,
    "measures": dict[str, Any], "speculation": _OBJECT | None, "requests": list[_OBJECT],
}  # fmt: skip
_MEASURES = {
    "output_tokens_per_second": _SPREAD, "tpot_seconds": _SPREAD, "ttft_seconds": _SPREAD,
}  # fmt: skip
_REQUEST = {
    "id": str, "repeat": int, "output_tokens": float | None, "latency_seconds": float | None,
    "tpot_seconds": float | None, "ttft_seconds": float | None,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A study with what came of it; `task` names it where a document has several."""

    study: Study
    records: Sequence[VariantRecord]
    task: str | None = None


def make_document(
    measured: Sequence[Measured],
    base: Variant,
    *,
    workload: dict[str, Any],
    limits: Limits | None = None,
    prices: Prices | None = None,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that was found; `workload` says how the questions were made."""
    study = measured[0].study  # the others differ in their questions only
    found = [_found(one, base, limits, prices) for one in measured]
    cells = [cell for part in found for cell in part.cells]
    compared = [comparison for part in found for comparison in part.comparisons]
    crossed = [] if len(measured) > 1 else crossovers(compared)
    drafts = {variant.name: variant.drafts for variant in study.variants}
    runs = [run for one in measured for record in one.records for run in record.runs]
    is_valid = all(run.is_valid for run in runs)
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "model": None if model is None else shown(model),
        "workload": {
            **workload,
            "api": study.workload.api,
            "temperature": study.workload.temperature,
            "ignore_eos": study.workload.ignore_eos,
            "requests": sum(one.study.workload.num_requests for one in measured),
            "repeats": study.repeats,
            "seed": study.seed,
        },
        "limits": None if limits is None else asdict(limits),
        "prices": None if prices is None else prices.as_json(),
        "base": base.name,
        "variants": [variant.as_json() for variant in study.variants],
        "is_valid": is_valid,
        "notes": [*notes, *_apart(compared), *_few_repeats(study), *_notes(runs)],
        "cells": [cell.as_json(prices) for cell in cells],
        "comparisons": [comparison.as_json() for comparison in compared],
        "crossovers": [crossover.as_json() for crossover in crossed],
        "tasks": [row for part in found for row in part.task_rows],
        "advice": advice(cells, compared, crossed, drafts, is_valid=is_valid),
    }


@dataclass(frozen=True)
class _Found:
    cells: list[Cell]
    comparisons: list[Comparison]
    task_rows: list[dict[str, Any]]


def _found(one: Measured, base: Variant, limits: Limits | None, prices: Prices | None) -> _Found:
    cells = make_cells(one.records, limits, task=one.task)
    is_greedy = one.study.workload.temperature == 0
    compared = compare_cells(cells, base.name, prices=prices, is_greedy=is_greedy)
    rows = [] if one.task is None else task_rows(one.task, cells, base.name)
    return _Found(cells, compared, rows)


def _few_repeats(study: Study) -> list[str]:
    if len(study.variants) < 2 or study.repeats >= FEWEST_REPEATS:
        return []
    return [
        f"with fewer than {FEWEST_REPEATS} repeats intervals cannot show that the machine was "
        "slower for a while: on a restless one they are too narrow"
    ]


def _apart(compared: Sequence[Comparison]) -> list[str]:
    worst = [c for c in compared if not c.is_comparable]
    if not worst:
        return []
    c = max(worst, key=lambda c: abs(c.cached_shares[0] - c.cached_shares[1]))
    base, own = (f"{share:.0%}" for share in c.cached_shares)
    return [
        f"not comparable: the prefix cache held {own} of the prompt tokens of {c.variant} and "
        f"{base} of those of {c.base} ({c.where}), so throughput and TTFT depend on their order. "
        "Turn the cache off (Headstart: `serve --no-prefix-caching`), or start a server for each"
    ]


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader must know, each thing once; every run's own are kept with it."""
    alike: dict[str, dict[str, None]] = {}
    for note in (note for run in runs for note in run.notes):
        alike.setdefault(re.sub(r"\d+", "#", note), {})[note] = None
    notes = [
        first + (f" ({len(others)} more, see `runs` in --json or --out)" if others else "")
        for first, *others in alike.values()
    ]
    late = [run.lag for run in runs if not run.is_valid]
    if late:
        notes.append(
            f"invalid: in {len(late)} of {len(runs)} runs the load generator was late by up to "
            f"{1e3 * max(lag.p99_seconds for lag in late):.1f} ms (99th percentile; "
            f"{1e3 * min(lag.limit_seconds for lag in late):.1f} ms would do), so its own delays "
            "are in the times. Leave it a core (one thread fewer for the server: --server-flags "
            "'--threads N'), ask fewer streams at once, or measure from another machine"
        )
    return notes


def read_document(path: Path) -> dict[str, Any]:
    """A saved result; DataError where it is none, or one of a newer Headstart."""
    path = path / RESULT_NAME if path.is_dir() else path
    try:
        found = parse_json(read_plain(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({why_unreadable(error)}); give a {RESULT_NAME} that "
            "`headstart bench` wrote."
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} is no result of `headstart bench`: its format is not {FORMAT}.")
    if found.get("version") != VERSION:
        raise DataError(
            f"{path} has version {found.get('version')!r} and this Headstart reads {VERSION}; "
            "measure again, or use the Headstart that wrote it."
        )
    if wrong := _misfit(found):
        raise DataError(f"{path} is damaged: {wrong}. Give the file as `headstart bench` wrote it.")
    return found


def _misfit(document: dict[str, Any]) -> str | None:
    """What is wrong with the parts that are compared, in words."""
    parts: list[tuple[dict[str, Any], Any]] = [(_DOCUMENT, document)]
    if misfit(_DOCUMENT, document) is None:
        for cell in document["cells"]:
            parts.append((_CELL, cell))
            if misfit(_CELL, cell) is None:
                parts.append((_MEASURES, cell["measures"]))
                parts += [(_REQUEST, request) for request in cell["requests"]]
    return next((wrong for kinds, part in parts if (wrong := misfit(kinds, part))), None)


def without_requests(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what is long: single requests and curves."""
    cells = [
        {name: value for name, value in cell.items() if name not in ("requests", "quantiles")}
        for cell in document["cells"]
    ]
    return {**document, "cells": cells}
