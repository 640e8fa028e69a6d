"""What pairs of measurements say: medians, the ratio of both trees, its spread, a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

LIMIT = 0.02  # a tree may be slower by this much
SLOWER = f"slower by more than {LIMIT:.0%} beyond the spread"
UNCLEAR = f"slower by more than {LIMIT:.0%}, within the spread"
FINE = "not slower"


def compare(old: Sequence[float], new: Sequence[float], *, is_time: bool = False) -> dict[str, Any]:
    """Ratios are speed of new over speed of old: 1.05 is a new tree that is 5 % faster.

    Turn i of both trees saw the machine in nearly the same state, so the spread is that of the
    ratios of turns. The verdict is `slower` only where three quarters of the turns agree.
    """
    medians = {"old": statistics.median(old), "new": statistics.median(new)}
    paired = [o / n if is_time else n / o for o, n in zip(old, new, strict=True)]
    ratio = medians["old"] / medians["new"] if is_time else medians["new"] / medians["old"]
    low, high = quartiles(paired)
    return {
        "old": {"median": medians["old"], "all": list(old)},
        "new": {"median": medians["new"], "all": list(new)},
        "ratio": ratio,
        "paired": {"all": paired, "min": min(paired), "max": max(paired), "quartiles": [low, high]},
        "turns": len(paired),
        "verdict": verdict(ratio, high),
    }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def verdict(ratio: float, upper_quartile: float) -> str:
    if ratio >= 1 - LIMIT:
        return FINE
    return SLOWER if upper_quartile < 1 - LIMIT else UNCLEAR


def described(row: dict[str, Any]) -> str:
    """A row as one line for people."""
    unit = row["unit"]
    low, high = row["paired"]["quartiles"]
    parts = [
        f"old {row['old']['median']:.4g} {unit}, new {row['new']['median']:.4g} {unit}",
        f"ratio {row['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}, {row['turns']} turns)",
        row["verdict"],
    ]
    if row.get("differing_answers"):
        parts.append(f"{row['differing_answers']} of {row['answers']} answers differ")
    return f"{row['what']}: {'; '.join(parts)}"
