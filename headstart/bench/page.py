"""report.html of a result, made from its document.

Advice and the table come first; then a chart for each question people ask; then where it ran and
the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headstart.bench.cells import QUANTILES
from headstart.bench.document import without_requests
from headstart.bench.rows import (
    NOT_COMPARABLE,
    Rows,
    acceptance_rows,
    comparison_rows,
    cost_rows,
    fastmtp_table,
    gap_rows,
    in_order,
    load_name,
    load_words,
    speed_up,
    spread_rows,
    task_table,
    xllm_rows,
)
from headstart.bench.tasks import ALL
from headstart.report.page import Page

_DISTRIBUTIONS = {
    "ttft_seconds": "Time to first token",
    "tpot_seconds": "Time per output token (per request)",
    "itl_per_token_seconds": "Inter-token latency, per token",
    "itl_per_chunk_seconds": "Inter-token latency, per chunk",
}
_HIGHEST_DRAWN = 99  # percentile: the last one would squeeze all others into the margin


def make_page(document: dict[str, Any]) -> Page:
    model = document["model"] or ", ".join(dict.fromkeys(v["url"] for v in document["variants"]))
    page = Page("Benchmark with and without MTP", f"{model}, {document['created']}")
    if not document["is_valid"]:
        page.text(
            "INVALID: the load generator was late, so its own delays are in the times. The notes "
            "say what to change."
        )
    for sentence in document["advice"]:
        page.text(sentence)
    loads = "Load is the number of streams, or conversations per second."
    _table(page, "", xllm_rows(document), "" if document["tasks"] else loads)
    _speed(page, document)
    _tasks(page, document)
    _table(
        page, f"Against {document['base']}", comparison_rows(document),
        "Ratios with 95 % intervals; a star marks those that may be noise. TPOT and TTFT: below 1 "
        "is faster.",
    )  # fmt: skip
    _acceptance(page, document)
    _latencies(page, document)
    _cost(page, document)
    _surroundings(page, document)
    page.json("benchmark", without_requests(document))
    return page


def _table(page: Page, title: str, rows: Rows, note: str = "") -> None:
    if len(rows) < 2:
        return
    if title:
        page.heading(title)
    page.table([str(head) for head in rows[0]], rows[1:], note)


def _speed(page: Page, document: dict[str, Any]) -> None:
    """Throughput by load, and the speed-up of each number of drafts."""
    if document["tasks"]:
        return
    cells, names = in_order(document), [v["name"] for v in document["variants"]]
    loads = list(dict.fromkeys(load_name(cell) for cell in cells))
    words = {load_name(cell): load_words(cell) for cell in cells}
    by_place = {(c["variant"], load_name(c)): c["measures"] for c in cells}
    values = {
        name: [_value(by_place.get((name, load)), "output_tokens_per_second") for load in loads]
        for name in names
    }
    is_open = any(cell["rate"] for cell in cells)
    label = "conversations per second" if is_open else "streams"
    page.heading("Throughput and speed-up")
    if len(loads) > 2:
        axis = "rate" if is_open else "concurrency"
        lines = {
            name: [
                (float(c[axis] or 0), c["measures"]["output_tokens_per_second"])
                for c in cells
                if c["variant"] == name
            ]
            for name in names
        }
        page.line_chart("Output throughput", lines, label, "output tokens per second")
    else:
        groups = [words[load] for load in loads]
        page.bar_chart("Output throughput", groups, values, "output tokens per second")
    ups = {
        (c["variant"], load_name(c)): c["speed_up"]["value"]
        for c in document["comparisons"]
        if c["speed_up"] is not None and speed_up(c) != NOT_COMPARABLE
    }
    others = [name for name in names if name != document["base"]]
    if ups:
        series = {
            words[load]: [ups.get((name, load), math.nan) for name in others] for load in loads
        }
        page.bar_chart(f"Speed-up over {document['base']}", others, series, "times as fast")


def _tasks(page: Page, document: dict[str, Any]) -> None:
    whole = [row for row in document["tasks"] if row["category"] == ALL and row["speed_up"]]
    whole = [row for row in whole if speed_up(row) != NOT_COMPARABLE]
    if not whole:
        return
    tasks = list(dict.fromkeys(row["task"] for row in whole))
    names = list(dict.fromkeys(row["variant"] for row in whole))
    ups = {(row["variant"], row["task"]): row["speed_up"]["value"] for row in whole}
    series = {name: [ups.get((name, task), math.nan) for task in tasks] for name in names}
    page.heading("Speed-up by task")
    page.bar_chart(f"Speed-up over {document['base']}", tasks, series, "times as fast")
    _table(page, "", fastmtp_table(document), "Acceptance length / output tokens per second.")
    _table(page, "", task_table(document), "Tokens per second of one stream.")


def _acceptance(page: Page, document: dict[str, Any]) -> None:
    rows = acceptance_rows(document)
    if len(rows) < 2:
        page.heading("Acceptance")
        page.text(_why_no_acceptance(document))
        return
    _table(
        page, "Acceptance", rows,
        "Cumulative: the draft and all before it were right. Conditional: given that those before "
        "it were. Acceptance length: tokens per trunk pass, the recovered or bonus one included.",
    )  # fmt: skip
    lines = {}
    for cell in in_order(document):
        rates = (cell["speculation"] or {}).get("cumulative_acceptance") or []
        name = cell["variant"] if cell["task"] is None else f"{cell['variant']}, {cell['task']}"
        # The load does not change what the head knows: the first one stands for all.
        if rates and name not in lines:
            lines[name] = [(float(depth), rate) for depth, rate in enumerate(rates, 1)]
    if any(len(line) > 1 for line in lines.values()):
        page.line_chart("Cumulative acceptance", lines, "depth", "cumulative share accepted")


def _why_no_acceptance(document: dict[str, Any]) -> str:
    silent = [c["variant"] for c in document["cells"] if c["speculation"] is None]
    if not silent:
        return "No drafts were made."
    names = ", ".join(dict.fromkeys(silent))
    return f"Not known: there are no speculation counters, in /metrics or in answers, of {names}."


def _latencies(page: Page, document: dict[str, Any]) -> None:
    _table(page, "Latencies (ms)", spread_rows(document))
    _table(page, "", gap_rows(document), "ITL: gaps within answers, per token and per chunk.")
    cells = in_order(document)
    loads = list(dict.fromkeys(load_name(cell) for cell in cells))
    for load in _first_and_last(loads):
        own = [cell for cell in cells if load_name(cell) == load]
        where = load_words(own[0])
        for name, title in _DISTRIBUTIONS.items():
            lines = {
                cell["variant"]: _curve(cell["quantiles"][name])
                for cell in own
                if name in cell["quantiles"]
            }
            if lines:
                page.line_chart(f"{title}, {where}", lines, "ms", "% of values that are at most so")


def _first_and_last(loads: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([loads[0], loads[-1]])) if loads else []


def _curve(values: Sequence[float]) -> list[tuple[float, float]]:
    pairs = zip(values, QUANTILES, strict=True)
    return [(1e3 * value, 100 * share) for value, share in pairs if 100 * share <= _HIGHEST_DRAWN]


def _cost(page: Page, document: dict[str, Any]) -> None:
    rows = cost_rows(document)
    if len(rows) < 2:
        return
    prices = document["prices"]
    said = ", ".join(f"{kind} {value:g}" for kind, value in prices["per_gpu_hour"].items())
    _table(
        page, "Cost", rows,
        f"Money per million tokens at {said} per GPU-hour, {prices['gpus']} GPU(s), fully used.",
    )  # fmt: skip
    kind = next(iter(prices["per_gpu_hour"]))
    cells = in_order(document)
    loads = list(dict.fromkeys(load_name(cell) for cell in cells))
    costs = {
        (c["variant"], load_name(c)): c["cost"]["per_million_output_tokens"][kind] for c in cells
    }
    series = {
        v["name"]: [_or_gap(costs.get((v["name"], load))) for load in loads]
        for v in document["variants"]
    }
    words = {load_name(cell): load_words(cell) for cell in cells}
    groups = [words[load] for load in loads]
    page.bar_chart("Cost of a million output tokens", groups, series, f"money, {kind}")


def _surroundings(page: Page, document: dict[str, Any]) -> None:
    page.heading("How and where")
    for note in document["notes"]:
        page.text(note)
    workload = {n: v for n, v in document["workload"].items() if v is not None}
    environment = dict(document["environment"])
    packages = environment.pop("packages")
    seed = {"seed": str(workload.pop("seed"))}
    page.facts({**workload, **seed, **environment, **packages})


def _value(measures: dict[str, Any] | None, name: str) -> float:
    return _or_gap(None if measures is None else measures[name])


def _or_gap(value: float | None) -> float:
    return math.nan if value is None else float(value)
