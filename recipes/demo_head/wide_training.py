"""Stages `begin`, `look` and `long`: a fresh head learns by `lk`, then by `tv` for a long time.

States are computed while training goes on: of tens of millions of tokens they would not fit on
most disks. `look` tries what the study left open, each from the same head, on the same records.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from answers import make_vocabulary
from scores import length_of, score_all
from training import base_options, trained
from wide_settings import Wide
from wide_text import read_lines

from headstart.checkpoint.hub import local_folder
from headstart.checkpoint.reader import Checkpoint
from headstart.simulate.scoring import WHOLE
from headstart.train.checkpoints import Checkpoints
from headstart.train.frozen_model import load_frozen_model
from headstart.train.options import TrainOptions
from headstart.train.result import write_head

_CLEARLY = 0.01  # of acceptance length: more than seeds differ
_ONLY_SHOWN = ("faster", "slower")  # a short training says little of the rate of a long one
_RESERVE = 0.06  # of the time, for validations and what comes before the first step
# What the study left open, beside the options as they are.
LOOKED_AT: dict[str, dict[str, Any]] = {
    "as-planned": {},
    "no-mean": {"average": 0.0},
    "late": {"schedule": "wsd", "decay": 0.4},
    "deeper": {"num_depths": 5},
    "sharper": {"teacher_temperature": 0.7},
    "faster": {"learning_rate": 2e-2},
    "slower": {"learning_rate": 5e-3},
    "end-to-end": {"loss": "e2e-tv"},
}


def train_begin(settings: Wide) -> None:
    """From a fresh head, all depths at once. Also makes the draft vocabulary of the answers."""
    make_vocabulary(settings)
    options = _options(settings, {
        "context": "prefix", "loss": "lk", "num_depths": 3, "optimizer": "muon",
        "learning_rate": settings.begin_rate,
    })  # fmt: skip
    trained(settings, settings.work / "begin", {"": options}, seconds=settings.seconds["begin"],
            validations=2, least=settings.begin_steps)  # fmt: skip


def look(settings: Wide) -> None:
    """A short training with each change, scored at K = 3 on what is validated on; look.json."""
    variants = {
        name: _options(settings, {**settings.options, **change})
        for name, change in LOOKED_AT.items()
    }
    out = settings.work / "look"
    trained(settings, out, variants, seconds=settings.seconds["look"], head=settings.stock)
    heads = {name: (_head_of(out, name), settings.vocab) for name in variants}
    lines = score_all(_Looked(settings), heads)
    found = {line["head"]: length_of(line, WHOLE) for line in lines}
    (settings.work / "look.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, length in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"look: {length:.3f} {name} {LOOKED_AT[name]}", flush=True)


class _Looked:
    """The settings with one set to score on: the answers that are validated on."""

    def __init__(self, settings: Wide) -> None:
        self.work, self.model, self.device = settings.work / "look", settings.model, settings.device
        self.processes, self.stock = settings.processes, settings.stock
        self.evaluation = {"validation": settings.answers}


def _head_of(out: Path, name: str) -> Path:
    """Where `trained` put it: heads may be dealt out to processes."""
    return next(iter([*out.glob(f"{name}/head"), *out.glob(f"part-*/{name}/head")]), out / name)


def chosen(settings: Wide) -> dict[str, Any]:
    """The options of the long training: as planned, unless a look found a clearly better one."""
    path = settings.work / "look.json"
    found: Mapping[str, float] = json.loads(path.read_text()) if path.is_file() else {}
    taken = [name for name in found if name not in _ONLY_SHOWN]
    best = max(taken, key=lambda name: found[name], default="as-planned")
    if found and found[best] < found["as-planned"] + _CLEARLY:
        best = "as-planned"
    return {**settings.options, **LOOKED_AT[best]}


def train_long(settings: Wide) -> None:
    """For as long as there is time, a curve on the way; at the deadline what is best is written."""
    started, seconds = time.monotonic(), settings.seconds["long"]
    options = chosen(settings)
    print(f"long: {options}", flush=True)
    out = settings.work / "long"
    steps = int(seconds * (1 - _RESERVE) / (_step_seconds(settings) * _cost(options)))
    found = trained(
        settings, out, {"": _options(settings, options)}, steps=max(4, steps), head=settings.stock,
        validations=settings.validations, deadline=started + seconds,
    )  # fmt: skip
    if not all(outcome.is_finished for outcome in found.values()):
        write_best(settings, out)


def _options(settings: Wide, changes: dict[str, Any]) -> TrainOptions:
    return base_options(
        settings, **{"cache": None, "draft_vocab": None, "batch_sequences": None,
                     "batch_tokens": settings.batch_tokens, **changes},
    )  # fmt: skip


def _step_seconds(settings: Wide) -> float:
    """Of a step of `begin`, which sees as many tokens."""
    lines = read_lines(settings.work / "begin" / "metrics.jsonl")
    times = [line["seconds"] for line in lines if "seconds" in line]
    return float(statistics.mean(sorted(times)[: max(1, len(times) - len(times) // 50)]))


def _cost(options: Mapping[str, Any]) -> float:
    """Of a step, with that of `begin` as 1: about half of it goes with the number of depths."""
    return 0.5 + 0.5 * int(options["num_depths"]) / 3


def write_best(settings: Wide, run: Path) -> None:
    """The best head of a run that its deadline stopped, beside the checkpoints to go on from."""
    kept = Checkpoints(run / "checkpoints", keep=1)
    _, newest = kept.read(kept.steps()[-1])
    tensors, progress = kept.read(newest.best_step)
    checkpoint = Checkpoint.open(local_folder(settings.model))
    frozen = load_frozen_model(checkpoint, settings.stock, device="cpu", dtype="float32")
    options = json.loads((run / "options.json").read_text())["options"]
    details = {
        "step": progress.step, "stopped": newest.step, "num_depths": options["num_depths"],
    }  # fmt: skip
    write_head(frozen, tensors, settings.work / "stopped" / "head", details)
    print(f"long: stopped at step {newest.step}, best {progress.step}; the same command goes on",
          flush=True)  # fmt: skip
