"""Faults on purpose, for tests: a step that diverges, a head that is worse than it promised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstart.learn.training import HeadTraining

if TYPE_CHECKING:
    from headstart.data.records import Record

NAN, WORSE = "nan", "worse"
FAULTS = (NAN, WORSE)


class DivergingTraining(HeadTraining):
    """The third step begins with weights that are not numbers."""

    def step(self, records: Sequence[Record], rate: float) -> float:
        if self.num_steps == 2:
            self.num_steps += 1  # once
            with torch.no_grad():
                next(iter(self._learner.parameters.values())).fill_(torch.nan)
        return super().step(records, rate)


class WorseTraining(HeadTraining):
    """What is written is not what was checked."""

    def write(self, out: Path, details: dict[str, Any], share: float = 1.0) -> None:
        with torch.no_grad():
            for parameter in self._mean.parameters.values():
                parameter.add_(torch.randn_like(parameter) * 3 * parameter.abs().mean())
        super().write(out, details, share)


def training_class(fault: str | None) -> type[HeadTraining]:
    return {None: HeadTraining, NAN: DivergingTraining, WORSE: WorseTraining}[fault]
