"""A running mean of a head's weights: steadier than any step's, while the rate is still high.

Each step leaves the share `decay` of the mean and adds the rest of the new weights. The first steps
leave less, so that the head as it was at the beginning is soon forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headstart.train.optimizers import like, whole

AVERAGE = "average."  # before a parameter's name in checkpoints
_UPDATES = "average_updates"


class Average:
    """The mean of some parameters over the steps so far."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.values = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """After a step."""
        left = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, value in self.values.items():
            # Not lerp, which split tensors do not have.
            value.mul_(left).add_(parameters[name].detach(), alpha=1 - left)

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint, whole; every process must ask."""
        result = {f"{AVERAGE}{name}": whole(value) for name, value in self.values.items()}
        return {**result, _UPDATES: torch.tensor(self.updates)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        self.updates = int(tensors[_UPDATES])
        for name, value in self.values.items():
            value.copy_(like(tensors[f"{AVERAGE}{name}"], value))
