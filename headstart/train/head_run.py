"""One head in training with its run folder: update, validate, write, resume."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from headstart.errors import TrainError, some
from headstart.train.checkpoints import Progress
from headstart.train.learner import Learner
from headstart.train.optimizers import learning_rate
from headstart.train.run_folder import RunFolder
from headstart.train.step import Sums
from headstart.train.tensorboard import TensorBoard
from headstart.train.validation import Validation


@dataclass
class HeadRun:
    """A head in training: its learner, its folder, and the step that it has reached."""

    learner: Learner
    folder: RunFolder
    progress: Progress
    tensorboard: TensorBoard | None = None  # on the process that writes

    @property
    def name(self) -> str:
        return self.learner.name

    def restore(self, step: int) -> None:
        """Go on from the checkpoint of `step`."""
        tensors, self.progress = self.folder.checkpoints.read(step)
        self.learner.load(tensors)

    def update(self, step: int, num_steps: int, sums: Sums) -> dict[str, Any]:
        """Use the gathered gradients for step number `step` (from 0); returns a metrics line."""
        rate = learning_rate(step, num_steps, self.learner.options)
        totals = Sums(self.learner.world.sum_(sums.values))
        try:
            norm = self.learner.update(rate)
        except RuntimeError as error:
            if "overflow" not in str(error):  # a rate that the weights' dtype cannot hold
                raise
            raise NotFinite from error
        if not math.isfinite(norm) or not math.isfinite(float(totals.total)):
            raise NotFinite
        self.progress = replace(self.progress, step=step + 1)
        pairs = zip(totals.loss.tolist(), totals.kept.tolist(), strict=True)
        chains = zip(totals.matches.tolist(), totals.chains.tolist(), strict=True)
        return {
            "step": step + 1,
            "loss": float(totals.total),
            "loss_by_depth": [loss / max(1, number) for loss, number in pairs],
            "cumulative_match": [right / max(1, number) for right, number in chains],
            "learning_rate": rate,
            "gradient_norm": norm,
        }

    def judge(self, found: Validation) -> None:
        """Remember the step if it is the best so far."""
        best = self.progress.best_length
        if best is None or found.length > best:
            self.progress = replace(
                self.progress, best_step=self.progress.step, best_length=found.length
            )

    def write(self, line: dict[str, Any]) -> None:
        if self.tensorboard is not None:
            self.folder.metrics.add(line)
            self.tensorboard.add(line)

    def close(self) -> None:
        """TensorBoard writes in a thread of its own, which would go on."""
        if self.tensorboard is not None:
            self.tensorboard.close()


class NotFinite(Exception):
    """A loss or a gradient is NaN or infinite."""


def not_finite(run: HeadRun, step: int, records: list[str]) -> TrainError:
    saved = run.folder.checkpoints.steps()
    where = f"the checkpoint of step {saved[-1]} is whole" if saved else "nothing was written"
    return TrainError(
        f"{run.name}: the loss or its gradient is not a finite number at step {step + 1}, with "
        f"records {some(records)}; {where}. Look at these records, lower --learning-rate, or "
        "compute in float32 (--dtype), with another --out."
    )
