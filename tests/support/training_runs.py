"""Short runs of training for tests: a tiny model, a small dataset, quick options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.calibrate.tiny import write_tiny
from headstart.train.job import Job
from headstart.train.options import TrainOptions, resolve
from headstart.train.trainer import Outcome, train
from headstart.train.watching import Watch
from support.training_data import random_records, write_data

# 12 steps with validations and checkpoints on the way, and several packed rows in a step. AdamW:
# Muon's iterations in bf16 would make more of the last bits, in which processes differ.
QUICK: dict[str, Any] = {
    "batch_tokens": 100, "pack_tokens": 40, "epochs": 2, "eval_every": 5, "save_every": 3,
    "optimizer": "adamw", "learning_rate": 3e-3, "num_depths": 2,
}  # fmt: skip


def write_inputs(folder: Path, dtype: str = "F32") -> Path:
    """folder/model and folder/data."""
    write_tiny("mimo", folder / "model", dtype=dtype)
    heldout = random_records(6, seed=9, prefix="h")
    write_data(folder / "model", folder / "data", random_records(40), heldout)
    return folder


def job(inputs: Path, out: Path, *, overwrite: bool = False, **options: Any) -> Job:
    given = resolve(TrainOptions(**{**QUICK, **options}))
    return Job(
        model=inputs / "model", data=inputs / "data", out=out, options={"": given},
        overwrite=overwrite,
    )  # fmt: skip


def trained(inputs: Path, out: Path, watch: Watch | None = None, **options: Any) -> Outcome:
    (outcome,) = train(job(inputs, out, **options), watch)
    return outcome


def flags(**options: Any) -> list[str]:
    """The same options for a command line."""
    given = {**QUICK, **options}
    return [word for n, v in given.items() for word in (f"--{n.replace('_', '-')}", str(v))]


def weights(run: Path) -> dict[str, bytes]:
    """Everything that an equal run must have equal: checkpoints and head."""
    files = [*run.glob("checkpoints/*.safetensors"), run / "head" / "head.safetensors"]
    return {path.name: path.read_bytes() for path in files}


def metrics(run: Path) -> list[dict[str, Any]]:
    """All lines, without what the clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return lines


class StopAt(Watch):
    """Asks to stop when a number of steps is done."""

    def __init__(self, step: int) -> None:
        self.stop, self.step, self.said = step, 0, list[str]()

    def say(self, text: str) -> None:
        self.said.append(text)

    def started(self, step: int, num_steps: int) -> None:
        self.step = step

    def stepped(self, step: int, metrics: Any) -> None:
        self.step = step

    def is_stopped(self) -> bool:
        return self.step >= self.stop
