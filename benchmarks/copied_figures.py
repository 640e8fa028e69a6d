"""What `copied_drafts.py` says of its rows: speeds by part, and predicted beside measured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from result_files import table

ALL, LOOPS = "all", "looping"


def middle(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each prompt, with each engine's answer that took the middle time behind the
    first token."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["id"], []).append(row)
    found = []
    for own in groups.values():
        chosen = {
            name: sorted(own, key=lambda row: row["seconds"][name] - row["prompt_seconds"][name])[
                len(own) // 2
            ]
            for name in own[0]["seconds"]
        }
        times = ("seconds", "prompt_seconds")
        found.append({
            **own[0], "identical": all(row["identical"] for row in own),
            **{time: {name: row[time][name] for name, row in chosen.items()} for time in times},
        })  # fmt: skip
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speeds over all rows, with and without the prompts' time, and `auto`'s over the others'."""
    tokens, names = sum(row["tokens"] for row in rows), list(rows[0]["seconds"])

    def speed(name: str, *, decoding: bool) -> float:
        seconds = sum(row["seconds"][name] for row in rows)
        if decoding:
            seconds -= sum(row["prompt_seconds"][name] or 0.0 for row in rows)
        return float(tokens / max(seconds, 1e-9))

    found: dict[str, Any] = {"prompts": len(rows), "tokens": tokens}
    for kind, decoding in (("whole", False), ("decoding", True)):
        speeds = {name: speed(name, decoding=decoding) for name in names}
        over = dict[str, float]()
        if "auto" in speeds:
            over = {f"auto_over_{n}": speeds["auto"] / s for n, s in speeds.items() if n != "auto"}
        found[kind] = {"tokens_per_second": speeds, **over}
    found["copied_share"] = sum(r["copied_share"] * r["tokens"] for r in rows) / max(1, tokens)
    found["identical"] = sum(row["identical"] for row in rows)
    return found


def summaries(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By part: all, those that do not loop, those that do, and the categories of the former."""
    straight = [row for row in rows if not row["loops"]]
    parts: dict[str, list[dict[str, Any]]] = {"all that do not loop": straight, ALL: [*rows]}
    parts[LOOPS] = [row for row in rows if row["loops"]]
    for row in straight:
        parts.setdefault(row["category"], []).append(row)
    return {name: summary(part) for name, part in parts.items() if part}


def mean_of(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several predictions, by part and side."""
    return {
        part: {side: float(np.mean([each[part][side] for each in said])) for side in own}
        for part, own in said[0].items()
    }


def repeats(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows by how often their prompt had been answered before; the last may not be whole."""
    found: list[list[dict[str, Any]]] = []
    seen: Counter[str] = Counter()
    for row in rows:
        if seen[row["id"]] == len(found):
            found.append([])
        found[seen[row["id"]]].append(row)
        seen[row["id"]] += 1
    return found


def compared(
    said: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Predicted and measured speeds over no drafts, by part and side.

    With the standard error of both, from the predictions that were made and the times that all
    prompts were answered; None of a single one.
    """
    middles, each_time = summaries(middle(rows)), repeats(rows)
    whole = [summaries(own) for own in each_time if len(own) == len(each_time[0])]
    mean, result = mean_of(said), list[dict[str, Any]]()
    for part in (part for part in mean if part in middles):
        for side, predicted in mean[part].items():
            real = _over_none(middles[part], side)
            result.append({
                "part": part, "side": side, "predicted": predicted, "measured": real,
                "off": predicted / real - 1,
                "predicted_error": _error([each[part][side] for each in said]),
                "measured_error": _error([_over_none(each[part], side) for each in whole]),
            })  # fmt: skip
    return result


def _over_none(part: dict[str, Any], side: str) -> float:
    speeds = part["decoding"]["tokens_per_second"]
    return float(speeds[side] / speeds["plain"])


def _error(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def tables(found: dict[str, Any], comparison: Sequence[dict[str, Any]]) -> list[str]:
    """`auto` over the others, and what was predicted beside what was measured."""
    sides = list(found[ALL]["decoding"]["tokens_per_second"])
    against = [name for name in sides if name != "auto"] if "auto" in sides else []
    lines = table(
        ["part", "prompts", "tokens", "copied", "identical",
         *(f"auto over {name}, decoding" for name in against)],
        [
            [name, str(own["prompts"]), str(own["tokens"]), f"{own['copied_share']:.0%}",
             str(own["identical"]),
             *(f"{own['decoding'][f'auto_over_{side}']:.3f}" for side in against)]
            for name, own in found.items()
        ],
    )  # fmt: skip
    if not comparison:
        return lines
    off = [abs(row["off"]) for row in comparison]
    lines += ["", f"Predicted within 5 %: {sum(each <= 0.05 for each in off)} of {len(off)}, mean "
              f"{np.mean(off):.1%}, most {max(off):.1%}.", ""]  # fmt: skip
    return lines + table(
        ["part", "drafts", "predicted over none", "measured", "off"],
        [
            [row["part"], row["side"], _with_error(row, "predicted"), _with_error(row, "measured"),
             f"{row['off']:+.1%}"]
            for row in comparison
        ],
    )  # fmt: skip


def _with_error(row: dict[str, Any], name: str) -> str:
    error = row[f"{name}_error"]
    return f"{row[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")
