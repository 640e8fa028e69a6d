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

from headstart.errors import TrainError, some
from headstart.train.checkpoints import Checkpoints, sync

OPTIONS, METRICS, REPORT = "options.json", "metrics.jsonl", "report.html"
_OTHERS = {
    "trunk": "another model (the trunk's weights differ)",
    "tokenizer": "another tokenizer",
    "data": "other data (another dataset, or `headstart distill` has written it again since)",
    "head": "another head to start from",
}


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path, keep: int, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, identity
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.metrics = Metrics(path / METRICS)

    def check(self, *, overwrite: bool) -> None:
        """Refuse a folder that is something else, or another run."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        found = self._stored()  # also before overwriting: only runs are replaced
        if not overwrite:
            _compare(self.path, found, self.identity)

    def start(self, *, overwrite: bool) -> None:
        """Make the folder, or clear what a stopped run left half-written."""
        if overwrite and self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.checkpoints.clear_partial()
        if not (self.path / OPTIONS).exists():
            write_text(self.path / OPTIONS, json.dumps(self.identity, indent=2) + "\n")

    def _stored(self) -> dict[str, Any]:
        path = self.path / OPTIONS
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise TrainError(
                f"{self.path} exists and is no run of `headstart train` ({OPTIONS} cannot be "
                "read). Choose another --out."
            ) from error
        if not isinstance(found, dict) or not isinstance(found.get("options"), dict):
            raise TrainError(f"{path} holds no options of a run. Choose another --out.")
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


def _compare(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Words first, digests last: what differs is what a user can act on."""
    advice = "Run it as it was begun, choose another --out, or add --overwrite to begin anew."
    for name, what in _OTHERS.items():
        was, now = found.get(name), wanted[name]
        if was != now:
            raise TrainError(
                f"{path} was begun with {what}. {advice} ({name} {_short(was)}, now {_short(now)})"
            )
    before, after = found["options"], wanted["options"]
    changes = [
        f"{name} {before.get(name)!r}, now {after.get(name)!r}"
        for name in {**after, **before}
        if before.get(name) != after.get(name)
    ]
    if changes:
        raise TrainError(f"{path} was begun with {some(changes)}. {advice}")


def _short(digest: object) -> str:
    return str(digest).rpartition(":")[2][:12]
