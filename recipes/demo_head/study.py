"""Stages `stock`, `study` and `closer`: which context, loss and training K make the best head.

Everything starts from one head that was trained as makers of models train theirs: for one token
ahead. Rows of the study differ in one thing each, see the same answers in the same order for the
same number of steps, and get the same search over learning rates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from settings import CONTEXTS, LOSSES, Settings
from training import base_options, steps_file, trained

from headstart.train.options import TrainOptions
from headstart.train.trainer import Outcome

FASTMTP = "fastmtp"
Row = dict[str, Any]


def train_stock(settings: Settings) -> None:
    """Depth 1 alone, against the trunk's distribution, from a fresh head."""
    options = base_options(
        settings, num_depths=1, loss="kl", optimizer="muon", learning_rate=settings.stock_rate
    )
    trained(settings, settings.work / "stock", {"": options}, seconds=settings.seconds["stock"])


def run_study(settings: Settings) -> None:
    """Context x loss at K = 3, and the FastMTP recipe, each with every learning rate.

    FastMTP's optimiser is AdamW. One more row with AdamW shows what the optimiser does.
    """
    rows: dict[str, Row] = {
        f"{context}-{loss}": {"context": context, "loss": loss, "optimizer": "muon"}
        for context in CONTEXTS
        for loss in LOSSES
    }
    rows["prefix-kl-adamw"] = {"context": "prefix", "loss": "kl", "optimizer": "adamw"}
    rows[FASTMTP] = {
        "context": "sequence", "loss": "ce", "optimizer": "adamw", "weight_decay": 0.1,
    }  # fmt: skip
    variants = {
        f"{name}-{rate:g}": base_options(settings, learning_rate=rate, **row)
        for name, row in rows.items()
        for rate in _rates(settings, name, row)
    }
    found = trained(
        settings, settings.work / "study", variants, seconds=settings.seconds["study"],
        head=settings.stock,
    )  # fmt: skip
    results = [_result(settings, found[name], variants[name], 0) for name in variants]
    _write(settings, "study", results)


def _rates(settings: Settings, name: str, row: Row) -> tuple[float, ...]:
    rates = settings.rates[row["optimizer"]]
    return (*rates, settings.published_rate) if name == FASTMTP else rates


def run_closer(settings: Settings) -> None:
    """Other training K for the two best rows, and other seeds for the rows closest to the best."""
    rows = best_of_rows(settings)
    steps = int(steps_file(settings.work / "study").read_text())
    depths = {
        f"{row['name']}-K{k}": base_options(settings, **{**row["options"], "num_depths": k})
        for row in rows[:2]
        for k in settings.train_depths
    }
    folder = settings.work / "depths"
    found = trained(settings, folder, depths, steps=steps, head=settings.stock)
    results = [_result(settings, found[name], depths[name], 0) for name in depths]
    names = [row["name"] for row in rows[:3]]
    names += [FASTMTP] if FASTMTP not in names else []
    for seed in settings.seeds:
        again = {
            row["name"]: base_options(settings, **row["options"], seed=seed)
            for row in rows
            if row["name"] in names
        }
        folder = settings.work / f"seed-{seed}"
        found = trained(settings, folder, again, steps=steps, head=settings.stock)
        results += [_result(settings, found[name], again[name], seed) for name in again]
    _write(settings, "closer", results)


def best_of_rows(settings: Settings) -> list[Row]:
    """The best learning rate of each row, best row first."""
    best: dict[str, Row] = {}
    for result in read(settings, "study"):
        name = result["name"]
        if result["length"] > best.get(name, {"length": 0.0})["length"]:
            best[name] = result
    return sorted(best.values(), key=lambda row: -row["length"])


def _result(settings: Settings, outcome: Outcome, options: TrainOptions, seed: int) -> Row:
    """What a training gave on held-out answers; a head that was dropped has length 0."""
    names = ("context", "loss", "optimizer", "learning_rate", "num_depths", "weight_decay")
    kept = {name: getattr(options, name) for name in names}
    after = outcome.after or {}
    return {
        # A training under `study` is called after its row and its rate.
        "name": outcome.name.removesuffix(f"-{options.learning_rate:g}"),
        "seed": seed,
        "options": kept,
        "head": str(Path(outcome.folder).relative_to(settings.work) / "head"),
        "failure": outcome.failure,
        "length": after.get("acceptance_length", 0.0) if not outcome.failure else 0.0,
        "cumulative": after.get("cumulative_acceptance"),
    }


def _write(settings: Settings, name: str, results: list[Row]) -> None:
    (settings.work / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    for row in sorted(results, key=lambda row: -row["length"])[:8]:
        print(f"{name}: {row['length']:.3f} {row['name']} {row['options']}", flush=True)


def read(settings: Settings, name: str) -> list[Row]:
    path = settings.work / f"{name}.json"
    return list(json.loads(path.read_text())) if path.is_file() else []
