"""Checkpoints of a run: one file each, whole or absent.

A file holds master weights, both moments, and as metadata the step and the best so far. The order
of the data is a function of the step, so nothing else is needed to go on exactly. Files are written
beside their place, flushed and renamed. The newest ones are kept, and of each of them the best so
far: a run can go back to any of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.documents import parse_json
from headstart.errors import TrainError
from headstart.files import partial_of

T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8})\.safetensors")


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0  # optimiser steps done
    best_step: int = 0
    best_length: float | None = None  # acceptance length there; None without held-out records


class Checkpoints:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def write(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Add a checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(progress.step)
        partial = partial_of(path)  # one name: the next run overwrites it
        try:
            save_file(dict(tensors), partial, metadata={"progress": json.dumps(asdict(progress))})
            sync(partial)
            os.replace(partial, path)
            sync(self.folder)
        except (OSError, SafetensorError) as error:  # the latter where the disk is full
            partial.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or error
            raise TrainError(
                f"{path} could not be written ({reason}); earlier checkpoints are whole. "
                "Make room and run the same command again: it goes on from the last one."
            ) from error

    def prune(self) -> None:
        """Remove those that are no longer kept."""
        newest = self.steps()[-self.keep :]
        kept = {*newest, *(self._open(step, lambda file: None)[1].best_step for step in newest)}
        for step in self.steps():
            if step not in kept:
                self.path(step).unlink()

    def remove_above(self, last: int) -> None:
        """Remove those of later steps: left alone, they would count as newer than new ones."""
        for step in self.steps():
            if step > last:
                self.path(step).unlink()

    def read(self, step: int) -> tuple[dict[str, Tensor], Progress]:
        return self._open(step, _tensors)

    def _open(self, step: int, get: Callable[[Any], T]) -> tuple[T, Progress]:
        path = self.path(step)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                found = get(file)
            return found, Progress(**parse_json(metadata["progress"]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainError(
                f"{path} is damaged ({error}). Remove it: the run then goes on from the one before."
            ) from error

    def clear_partial(self) -> None:
        """Remove what a kill left half-written."""
        if self.folder.is_dir():
            for path in self.folder.glob(".step-*.partial"):
                path.unlink()


def _tensors(file: Any) -> dict[str, Tensor]:
    names: Iterable[str] = file.keys()
    return {name: file.get_tensor(name) for name in names}


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
