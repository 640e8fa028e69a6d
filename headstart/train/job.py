"""What was asked of training, and what of it can be refused before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.errors import TrainError, some
from headstart.train.options import TrainOptions

HEAD = "head"  # in a run's folder; written last, so a run that has it is finished
FAILED = "failed.json"  # of a head that was dropped while others went on


@dataclass(frozen=True, kw_only=True)
class Job:
    """`options` are resolved, by the name of each head ("" for one alone)."""

    model: Path
    data: Path
    out: Path | None  # None: only planned
    options: Mapping[str, TrainOptions]
    head: Path | None = None
    overwrite: bool = False

    @property
    def shared(self) -> TrainOptions:
        """Options of which all heads have the same."""
        return next(iter(self.options.values()))

    def folder(self, name: str) -> Path:
        assert self.out is not None, "a run has a folder"
        return self.out / name if name else self.out

    def check(self) -> None:
        """Refuse a model or data that is not there, and a run that is finished."""
        for folder in (self.model, self.head):
            if folder is not None:
                Checkpoint.open(folder)
        Checkpoint.open(self.head or self.model).links()  # its files go along with the result
        Dataset.open(self.data)
        if self.out is None or self.overwrite:
            return
        runs = [self.folder(name) for name in self.options]
        heads = [run / HEAD for run in runs if (run / HEAD).is_dir()]
        num_failed = sum((run / FAILED).is_file() for run in runs)
        if heads and len(heads) + num_failed == len(runs):
            raise TrainError(
                f"{self.out} holds a finished run; the result is in {some(heads)}. Choose "
                "another --out, or add --overwrite to train again."
            )
