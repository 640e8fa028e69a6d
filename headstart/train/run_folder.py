"""The folder of a run: whose it is, whether it may be gone on with, and its metrics.

options.json     the resolved options, and digests of model, head and data
metrics.jsonl    a line per step and per validation
tensorboard/     the same, where TensorBoard is installed
checkpoints/     to go on from
head/            the best head; it is written last, so a run that has it is finished
report.html
failed.json      instead of a head, where others went on without this one
.replaced/       an older run, until this one has begun (replacing.py)
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headstart.checkpoint.atomic import check_parents
from headstart.documents import misfit, parse_json
from headstart.errors import TrainError, some
from headstart.files import partial_of, plain_lines, read_plain, write_whole
from headstart.train.checkpoints import Checkpoints, sync
from headstart.train.job import FAILED, HEAD
from headstart.train.options import RECIPES, TrainOptions
from headstart.train.replacing import Replaced

OPTIONS, METRICS, REPORT = "options.json", "metrics.jsonl", "report.html"
FORMAT = {"headstart_run": 1}  # in options.json: no other file of that name has it
_TENSORBOARD, _CHECKPOINTS = "tensorboard", "checkpoints"
_NAMES = (OPTIONS, HEAD, REPORT, _CHECKPOINTS, METRICS, _TENSORBOARD, FAILED)
_OTHERS = {
    "trunk": "another model (the trunk's weights differ)",
    "tokenizer": "another tokenizer",
    "data": "other data (another dataset, or `headstart distill` has written it again since)",
    "head": "another head to start from",
    "vocabulary": "another draft vocabulary (its ids differ)",
}
_RATES = list[float]
_LINE = {"step": int, "validation": dict[str, Any] | None}
_STEP = {
    "loss": float, "loss_by_depth": _RATES, "cumulative_match": _RATES, "learning_rate": float,
    "gradient_norm": float, "epoch": float, "tokens": int, "seconds": float,
}  # fmt: skip
_CATEGORY = {"acceptance_length": float, "cumulative_acceptance": _RATES}
_VALIDATION = {
    **_CATEGORY, "conditional_acceptance": _RATES, "rounds": int,
    "by_category": dict[str, dict[str, Any]],
}  # fmt: skip


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path, keep: int, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, {**FORMAT, **identity}
        self.checkpoints = Checkpoints(path / _CHECKPOINTS, keep)
        self.metrics = Metrics(path / METRICS)
        self.tensorboard = path / _TENSORBOARD
        self.replaced = Replaced(path, _NAMES)
        self._is_locked = False

    def check(self, *, overwrite: bool) -> None:
        """Refuse a folder that is something else, or another run."""
        check_parents(self.path)
        if not self.path.exists() or self.replaced.is_half_done:
            return
        # A run killed during its first write leaves only this partial file: the folder is free.
        partial = partial_of(self.path / OPTIONS)
        if self.path.is_dir() and all(path == partial for path in self.path.iterdir()):
            return
        found = self._stored()  # also before overwriting: only runs are replaced
        if not overwrite:
            _compare(self.path, found, self.identity)

    def lock(self, locks: ExitStack) -> None:
        """Keep other runs out until `locks` ends; TrainError where one is at work here."""
        if self._is_locked:
            return
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise TrainError(
                f"another run is writing {self.path} right now. Wait for it to end, or choose "
                "another --out."
            ) from None
        self._is_locked = True
        locks.callback(self._unlock, handle)

    def _unlock(self, handle: int) -> None:
        self._is_locked = False
        os.close(handle)

    def start(self, *, overwrite: bool, locks: ExitStack) -> None:
        """Make the folder, or clear what a stopped run left half-written."""
        if not self._is_locked:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock(locks)
            self.check(overwrite=overwrite)  # again: it may have been made meanwhile
        if overwrite or self.replaced.is_half_done:
            self.replaced.set_aside(has_begun=bool(self.checkpoints.steps()))
        self.checkpoints.clear_partial()
        if overwrite or not (self.path / OPTIONS).exists():
            _write(self.path / OPTIONS, json.dumps(self.identity, indent=2) + "\n")

    @property
    def is_finished(self) -> bool:
        return (self.path / HEAD).is_dir()

    @property
    def failure(self) -> str | None:
        """Why the head was dropped, if it was."""
        try:
            return str(parse_json(read_plain(self.path / FAILED))["error"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainError(
                f"{self.path / FAILED} cannot be read ({error}). Remove it to try this head again."
            ) from error

    def fail(self, step: int, error: str) -> None:
        """Note that the head was dropped, so that no later start resumes it."""
        _write(self.path / FAILED, json.dumps({"step": step, "error": error}) + "\n")

    def go_back(self, step: int | None) -> None:
        """Forget what came after `step` (None: everything): it will be done again."""
        last = -1 if step is None else step
        self.metrics.go_back(last)
        self.checkpoints.remove_above(last)

    def _stored(self) -> dict[str, Any]:
        path = self.path / OPTIONS
        try:
            found = parse_json(read_plain(path))
        except (OSError, ValueError) as error:
            raise TrainError(
                f"{self.path} exists and is no run of `headstart train` ({OPTIONS} cannot be "
                "read). Choose another --out."
            ) from error
        is_run = isinstance(found, dict) and isinstance(found.get("options"), dict)
        if not is_run or any(found.get(name) != value for name, value in FORMAT.items()):
            raise TrainError(
                f"{self.path} exists and is no run of `headstart train` ({OPTIONS} has no "
                f"{json.dumps(FORMAT)[1:-1]}). Choose another --out."
            )
        return dict(found)


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

    def lines(self, last: float = math.inf) -> list[dict[str, Any]]:
        """All whole lines of steps up to `last`; one that a kill tore is left out."""
        if not self.path.exists():
            return []
        result = []
        for number, line in enumerate(self._read(), 1):
            try:
                found = parse_json(line)
            except ValueError:
                break
            step = found.get("step") if isinstance(found, dict) else None
            if type(step) is int and step > last:
                continue
            if wrong := _misfit(found):
                raise TrainError(
                    f"{self.path} line {number} is not as it was written: {wrong}. Begin anew with "
                    "--overwrite, or take the file from a copy."
                )
            result.append(found)
        return result

    def _read(self) -> Iterator[bytes]:
        try:
            yield from plain_lines(self.path)
        except OSError as error:
            raise TrainError(
                f"{self.path} cannot be read ({error.strerror}). Begin anew with --overwrite, or "
                "take the file from a copy."
            ) from error

    def go_back(self, step: int) -> None:
        """Forget what came after `step`: it will be done again."""
        kept = self.lines(last=step)
        _write(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def _misfit(line: Any) -> str | None:
    """What is wrong with a line of metrics, in words."""
    if not isinstance(line, dict):
        return "it is no object"
    found = line.get("validation")
    wrong = misfit(_LINE, line) or misfit(_STEP if "loss" in line else {}, line)
    if wrong is None and found is None and "loss" not in line:
        wrong = "it has neither a loss nor a validation"
    if wrong is None and found is not None:
        wrong = misfit(_VALIDATION, found)
    if wrong is None and found is not None:
        parts = found["by_category"].values()
        wrong = next((bad for part in parts if (bad := misfit(_CATEGORY, part))), None)
    return wrong


def _write(path: Path, text: str) -> None:
    write_whole(path, text.encode(), is_only_writer=True)


def _compare(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Words first, digests last: what differs is what a user can act on."""
    advice = "Run it as it was begun, choose another --out, or add --overwrite to begin anew."
    for name, what in _OTHERS.items():
        was, now = found.get(name), wanted[name]
        if was != now:
            raise TrainError(
                f"{path} was begun with {what}. {advice} ({name} {_short(was)}, now {_short(now)})"
            )
    before, after = _filled(found["options"]), wanted["options"]
    changes = [
        f"{name} {before.get(name)!r}, now {after.get(name)!r}"
        for name in {**after, **before}
        if before.get(name) != after.get(name)
    ]
    if changes:
        raise TrainError(f"{path} was begun with {some(changes)}. {advice}")


def _filled(options: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults for options that did not exist yet when the run was begun."""
    recipe = RECIPES.get(str(options.get("recipe")), {})
    return {**TrainOptions().document(), **recipe, **options}


def _short(digest: object) -> str:
    return str(digest).rpartition(":")[2][:12]
