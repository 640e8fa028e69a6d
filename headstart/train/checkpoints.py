"""Checkpoints of a run: one file each, whole or absent.

A file holds master weights, both moments, and as metadata the step and the best so far. The order
of the data is a function of the step, so nothing else is needed to go on exactly. Files are written
beside their place, flushed and renamed; the newest ones and the best are kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.errors import TrainError

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
        """Add a checkpoint, then remove those that are no longer kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(progress.step)
        partial = path.with_name(f".{path.name}.partial")  # one name: the next run overwrites it
        try:
            save_file(dict(tensors), partial, metadata={"progress": json.dumps(asdict(progress))})
            sync(partial)
            os.replace(partial, path)
            sync(self.folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise TrainError(
                f"{path} could not be written ({error.strerror}); earlier checkpoints are whole. "
                "Make room and run the same command again: it goes on from the last one."
            ) from error
        kept = {*self.steps()[-self.keep :], progress.best_step}
        for step in self.steps():
            if step not in kept:
                self.path(step).unlink()

    def read(self, step: int) -> tuple[dict[str, Tensor], Progress]:
        path = self.path(step)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, Progress(**json.loads(metadata["progress"]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainError(
                f"{path} is damaged ({error}). Remove it: the run then goes on from the one before."
            ) from error

    def clear_partial(self) -> None:
        """Remove what a kill left half-written."""
        if self.folder.is_dir():
            for path in self.folder.glob(".step-*.partial"):
                path.unlink()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
