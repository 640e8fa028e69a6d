"""Rows of the tables that the terminal shows and the page prints; the first row has the heads.

The first table has the columns of xLLM's documentation. Everything is made from the document.
"""

from __future__ import annotations

from typing import Any

from headstart.bench.tasks import ALL, mean_rows
from headstart.bench.words import stream_words

Rows = list[list[object]]  # text and numbers; None is absent
NOT_COMPARABLE = "not comparable"
_SPREADS = {"TTFT": "ttft_seconds", "TPOT": "tpot_seconds"}
_GAPS = {"ITL/token": "itl_per_token_seconds", "ITL/chunk": "itl_per_chunk_seconds"}


def xllm_rows(document: dict[str, Any]) -> Rows:
    with_goodput = document["limits"] is not None
    heads = ["mean TPOT ms", "mean TTFT ms", "output tokens/s", "total tokens/s"]
    rows: Rows = [
        [
            *_first(document),
            *heads,
            *(["good tokens/s", "good requests/s"] if with_goodput else []),
            "answered",
        ]
    ]
    for cell in in_order(document):
        m = cell["measures"]
        good = [m["good_output_tokens_per_second"], m["good_requests_per_second"]]
        rows.append([
            cell["variant"], load_name(cell), _ms(m["tpot_seconds"]), _ms(m["ttft_seconds"]),
            m["output_tokens_per_second"], m["total_tokens_per_second"],
            *(good if with_goodput else []),
            f"{m['num_answered']}/{m['num_requests']}",
        ])  # fmt: skip
    return rows


def spread_rows(document: dict[str, Any]) -> Rows:
    """Median and 99th percentile of what a request waits, in ms."""
    return _spreads(document, _SPREADS)


def gap_rows(document: dict[str, Any]) -> Rows:
    """The same of the gaps within answers; a table of its own, for terminals of 100 columns."""
    return _spreads(document, _GAPS)


def _spreads(document: dict[str, Any], names: dict[str, str]) -> Rows:
    heads = [f"{name} {part}" for name in names for part in ("median", "p99")]
    rows: Rows = [[*_first(document), *heads]]
    for cell in in_order(document):
        row: list[object] = [cell["variant"], load_name(cell)]
        for name in names.values():
            found = cell["measures"][name]
            row += [_ms(found, "median"), _ms(found, "p99")]
        rows.append(row)
    return rows


def comparison_rows(document: dict[str, Any]) -> Rows:
    kinds = [] if document["prices"] is None else list(document["prices"]["per_gpu_hour"])
    rows: Rows = [[*_first(document), "speed-up", "TPOT ratio", "TTFT ratio",
             "greedy answers equal", *(["saving"] if kinds else [])]]  # fmt: skip
    for c in document["comparisons"]:
        answers = c["answers"]
        equal = None if answers is None else f"{answers['equal']}/{answers['compared']}"
        # A price per hour is a factor: what is saved does not depend on which it is.
        is_comparable = c.get("comparable", True)
        saved = [c["savings"].get(kinds[0]) if is_comparable else None] if kinds else []
        rows.append([
            c["variant"], load_name(c), speed_up(c), interval(c["tpot"]),
            interval(c["ttft"]) if is_comparable else NOT_COMPARABLE, equal,
            *(None if value is None else f"{100 * value:.0f} %" for value in saved),
        ])  # fmt: skip
    return rows


def acceptance_rows(document: dict[str, Any]) -> Rows:
    # None: SGLang counts rounds only
    cells = [
        cell
        for cell in in_order(document)
        if cell["speculation"] is not None and cell["speculation"]["draft_tokens"] != 0
    ]
    # Older reports and other engines do not say what was copied.
    copies = any(cell["speculation"].get("copied_tokens") for cell in cells)
    rows: Rows = [
        [*_first(document), "acceptance length", *(["of drafts copied"] if copies else []),
         "cumulative", "conditional", "read from"]
    ]  # fmt: skip
    for cell in cells:
        found = cell["speculation"]
        share = found.get("copied_share")
        copied = [None if share is None else f"{100 * share:.0f} %"] if copies else []
        rows.append([
            cell["variant"], load_name(cell), found["acceptance_length"], *copied,
            rates(found["cumulative_acceptance"]), rates(found["conditional_acceptance"]),
            found["source"],
        ])  # fmt: skip
    return rows


def cost_rows(document: dict[str, Any]) -> Rows:
    if document["prices"] is None:
        return []
    kinds = list(document["prices"]["per_gpu_hour"])
    rows: Rows = [
        [*_first(document), *(f"{part}, {k}" for part in ("output", "total") for k in kinds)]
    ]
    for cell in in_order(document):
        output = cell["cost"]["per_million_output_tokens"]
        total = cell["cost"]["per_million_total_tokens"] or {}
        costs = [part.get(kind) for part in (output, total) for kind in kinds]
        rows.append([cell["variant"], load_name(cell), *costs])
    return rows


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


def _first(document: dict[str, Any]) -> list[str]:
    return ["method", "task" if document["tasks"] else "load"]


def in_order(document: dict[str, Any]) -> list[dict[str, Any]]:
    """By load, then by variant, so that what is compared stands together."""
    names = [variant["name"] for variant in document["variants"]]
    tasks = list(dict.fromkeys(cell["task"] for cell in document["cells"]))
    return sorted(
        document["cells"],
        key=lambda c: (
            tasks.index(c["task"]), c["rate"] or 0, c["concurrency"] or 0,
            names.index(c["variant"]),
        ),
    )  # fmt: skip


def load_name(cell: dict[str, Any]) -> str:
    """The task; else streams of a closed loop as a number, an open loop's rate with its unit."""
    if cell.get("task"):
        return str(cell["task"])
    if cell["rate"] is None:
        return str(cell["concurrency"])
    return f"{cell['rate']:g}/s"


def load_words(cell: dict[str, Any]) -> str:
    """The same for titles: `1 stream`."""
    if cell.get("task") or cell["rate"] is not None:
        return load_name(cell)
    return stream_words(cell["concurrency"])


def interval(ratio: dict[str, Any] | None) -> str | None:
    """`1.45 (1.40 to 1.51)`; a star where 1 is inside."""
    if ratio is None:
        return None
    if ratio["low"] is None:
        return f"{ratio['value']:.2f}"
    mark = "*" if ratio["noise"] else ""
    return f"{ratio['value']:.2f}{mark} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def speed_up(row: dict[str, Any]) -> str | None:
    """Of a comparison or a task. An open loop's is that of TPOT, whatever was cached."""
    if row["speed_up"] is None or row.get("comparable", True) or row.get("rate"):
        return interval(row["speed_up"])
    return NOT_COMPARABLE


def rates(values: list[float | None]) -> str | None:
    """By depth; a question mark for one that is not known."""
    return " ".join("?" if value is None else f"{value:.2f}" for value in values) or None


def _ms(spread: dict[str, Any] | None, part: str = "mean") -> float | None:
    return None if spread is None else 1e3 * float(spread[part])
