"""What `copied_drafts.py` says of its rows: speeds by part, and predicted beside measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
from result_files import table

ALL, LOOPS = "all", "looping"


def joined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each prompt, with the mean times of all its answers."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["id"], []).append(row)
    times = ("seconds", "prompt_seconds")
    return [
        {
            **own[0], "identical": all(row["identical"] for row in own),
            **{time: {name: fmean(row[time][name] for row in own) for name in own[0][time]}
               for time in times},
        }
        for own in groups.values()
    ]  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speeds over all rows, with and without the prompts' time, and `auto`'s over the others'."""
    tokens, names = sum(row["tokens"] for row in rows), list(rows[0]["seconds"])

    def speed(name: str, *, decoding: bool) -> float:
        seconds = sum(_decoding(r, name) if decoding else r["seconds"][name] for r in rows)
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


def compared(
    said: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], every: int
) -> list[dict[str, Any]]:
    """Predicted and measured speeds over no drafts, by part and side.

    Each `every` rows are predicted by the mean of what was said before and after them, from the
    time that they took without drafts. With the standard error of what predictions are off, by how
    these rows differ.
    """
    slices = [rows[at : at + every] for at in range(0, every * (len(said) - 1), every)]
    result = list[dict[str, Any]]()
    for part, side in [(part, side) for part, own in said[0].items() for side in own]:
        times = list[tuple[float, float, float]]()  # without drafts, as predicted, as measured
        for own, before, after in zip(slices, said, said[1:], strict=False):
            own = [row for row in own if part in (ALL, _part(row))]
            if own:
                plain, real = (sum(_decoding(row, name) for row in own) for name in ("plain", side))
                times.append((plain, plain / fmean((before[part][side], after[part][side])), real))
        if not times:
            continue
        plain, expected, real = map(sum, zip(*times, strict=True))
        off = [took / guess - 1 for _, guess, took in times]
        error = stdev(off) / len(off) ** 0.5 if len(off) > 1 else None
        result.append({
            "part": part, "side": side, "predicted": plain / expected, "measured": plain / real,
            "off": real / expected - 1, "error": error,
        })  # fmt: skip
    return result


def _part(row: dict[str, Any]) -> str:
    return LOOPS if row["loops"] else str(row["category"])


def _decoding(row: dict[str, Any], name: str) -> float:
    return float(row["seconds"][name] - (row["prompt_seconds"][name] or 0.0))


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
            [row["part"], row["side"], f"{row['predicted']:.3f}", f"{row['measured']:.3f}",
             f"{row['off']:+.1%}" + (f" ± {row['error']:.1%}" if row["error"] else "")]
            for row in comparison
        ],
    )  # fmt: skip
