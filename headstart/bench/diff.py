"""What changed between two results, and whether it is noise.

Results of the same questions are compared request by request; of others, as two samples. They were
not measured in turn, so a machine that was slower on one day looks like a change: the spread of
repeats catches some of that.

A verdict is about one figure, as its interval says. With many figures some change by chance: `sure`
are those that would hardly do so in any of all (Holm's method, 5 % for the whole result).
"""

from __future__ import annotations

from typing import Any

from headstart.bench.statistics import Ratio, Sample, ratio

_FIGURES = {  # name: what a request adds, and whether more is better
    "output_tokens_per_second": ("tokens", True),
    "tpot_seconds": ("tpot_seconds", False),
    "ttft_seconds": ("ttft_seconds", False),
}
_FALSE_ALARMS = 0.05  # share of results without a change that may have any sure figure
_IGNORED = ("command",)  # it names files and ports
_SAME_QUESTIONS = ("prompts", "input_tokens", "output_tokens", "api", "ignore_eos", "seed", "tasks")


def diff(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Figures of every cell that both have; what else differs; what only one has."""
    before, after = _cells(old), _cells(new)
    shared = [place for place in before if place in after]
    is_paired = all(
        old["workload"].get(name) == new["workload"].get(name) for name in _SAME_QUESTIONS
    )
    cells = [_changed(place, before[place], after[place], is_paired=is_paired) for place in shared]
    figures = [figure for cell in cells for figure in cell["figures"].values()]
    _judge_together(figures)
    verdicts = [figure["verdict"] for figure in figures]
    surely = [figure["verdict"] for figure in figures if figure["sure"]]
    return {
        "settings": _settings(old, new),
        "paired": is_paired,
        "only_in_first": [_named(place) for place in before if place not in after],
        "only_in_second": [_named(place) for place in after if place not in before],
        "cells": cells,
        "num_figures": len(verdicts),
        "num_better": verdicts.count("better"),
        "num_worse": verdicts.count("worse"),
        "num_surely_better": surely.count("better"),
        "num_surely_worse": surely.count("worse"),
        "is_valid": bool(old["is_valid"] and new["is_valid"]),
    }


def _judge_together(figures: list[dict[str, Any]]) -> None:
    """Holm: the smallest chance of n is held against 5 % / n, the next against 5 % / (n - 1), ...
    until one is too large; however the figures depend on each other."""
    for figure in figures:
        figure["sure"] = False
    known = [f for f in figures if f["ratio"] is not None and f["ratio"]["p_value"] is not None]
    for left, figure in zip(range(len(known), 0, -1), sorted(known, key=_chance), strict=True):
        if _chance(figure) > _FALSE_ALARMS / left:
            break
        figure["sure"] = figure["verdict"] in ("better", "worse")


def _chance(figure: dict[str, Any]) -> float:
    return float(figure["ratio"]["p_value"])


_Place = tuple[str, str | None, int | None, float | None]


def _cells(document: dict[str, Any]) -> dict[_Place, dict[str, Any]]:
    return {
        (cell["variant"], cell["task"], cell["concurrency"], cell["rate"]): cell
        for cell in document["cells"]
    }


def _named(place: _Place) -> dict[str, Any]:
    return dict(zip(("variant", "task", "concurrency", "rate"), place, strict=True))


def _changed(
    place: _Place, old: dict[str, Any], new: dict[str, Any], *, is_paired: bool
) -> dict[str, Any]:
    figures = {}
    for name, (what, is_more_better) in _FIGURES.items():
        values = [_figure(cell, name) for cell in (old, new)]
        samples = [
            _samples(cell, what, apart="" if is_paired else side)
            for side, cell in (("old ", old), ("new ", new))
        ]
        direct = values[1] / values[0] if values[0] and values[1] else None
        change = ratio(*samples, value=direct)
        figures[name] = {
            "old": values[0],
            "new": values[1],
            "ratio": None if change is None else change.as_json(),
            "verdict": _verdict(change, is_more_better),
        }
    rates = [(cell["speculation"] or {}).get("acceptance_length") for cell in (old, new)]
    return {**_named(place), "figures": figures, "acceptance_length": rates}


def _verdict(change: Ratio | None, is_more_better: bool) -> str:
    """`noise` where 1 is inside the interval, `unknown` where there is none."""
    if change is None or change.is_noise is None:
        return "unknown"
    if change.is_noise:
        return "noise"
    return "better" if (change.value > 1) == is_more_better else "worse"


def _figure(cell: dict[str, Any], name: str) -> float | None:
    found = cell["measures"][name]
    value = found["mean"] if isinstance(found, dict) else found
    return None if value is None else float(value)


def _samples(cell: dict[str, Any], what: str, *, apart: str) -> list[Sample]:
    """`apart` goes before ids that must not be taken for the same request."""
    found = []
    for request in cell["requests"]:
        key, repeat = f"{apart}{request['id']}", request["repeat"]
        if what == "tokens":
            if request["latency_seconds"]:
                found.append(
                    Sample(key, repeat, request["output_tokens"], request["latency_seconds"])
                )
        elif request[what] is not None:
            found.append(Sample(key, repeat, request[what]))
    return found


def _settings(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[Any]]:
    """Settings and surroundings that are not the same, each with both values."""
    found: dict[str, list[Any]] = {}
    for part in ("environment", "workload"):
        for name in {**old[part], **new[part]}:
            values = [old[part].get(name), new[part].get(name)]
            if name not in _IGNORED and values[0] != values[1]:
                found[f"{part}: {name}"] = values
    if old["model"] != new["model"]:
        found["model"] = [old["model"], new["model"]]
    return found
