"""The folder of a run: whose it is, whether it may be gone on with, and its metrics.

options.json     the resolved options, and digests of model, head and data
metrics.jsonl    a line per step and per validation
tensorboard/     the same, where TensorBoard is installed
checkpoints/     to go on from
head/            the best head; it is written last, so a run that has it is finished
report.html
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.errors import TrainError
from headstart.train.checkpoints import Checkpoints, sync

OPTIONS, METRICS, HEAD, REPORT = "options.json", "metrics.jsonl", "head", "report.html"


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.metrics = Metrics(path / METRICS)

    @property
    def is_finished(self) -> bool:
        return (self.path / HEAD).is_dir()

    def check(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """Refuse a folder that is something else, or another run."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        document = self._identity()  # also before overwriting: only runs are replaced
        if not overwrite:
            _compare(self.path, document, identity)

    def start(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder, or clear what a stopped run left half-written."""
        if overwrite and self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.checkpoints.clear_partial()
        if not (self.path / OPTIONS).exists():
            write_text(self.path / OPTIONS, json.dumps(identity, indent=2) + "\n")

    def _identity(self) -> dict[str, Any]:
        path = self.path / OPTIONS
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise TrainError(
                f"{self.path} exists and is no run of `headstart train` ({OPTIONS} cannot be "
                "read). Choose another --out."
            ) from error
        if not isinstance(found, dict):
            raise TrainError(f"{path} is not a JSON object. Choose another --out.")
        return found


class Metrics:
    """metrics.jsonl, appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Before a checkpoint that counts on these lines."""
        if self.path.exists():
            sync(self.path)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines; one that a kill tore is left out."""
        if not self.path.exists():
            return []
        result = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                result.append(json.loads(line))
            except ValueError:
                break
        return result

    def go_back(self, step: int) -> None:
        """Forget what came after `step`: it will be done again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _compare(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], at: str = "") -> None:
    for name in [*wanted, *(n for n in found if n not in wanted)]:
        here, now = found.get(name), wanted.get(name)
        if isinstance(here, dict) and isinstance(now, dict):
            _compare(path, here, now, f"{at}{name}.")
        elif here != now:
            raise TrainError(
                f"{path} is a run with {at}{name} {here!r}; now it is {now!r}. Run it as it was "
                "begun, choose another --out, or add --overwrite to begin anew."
            )
