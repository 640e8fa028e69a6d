"""Feed-forward parts without gates, by the square of what is above 0 (Nemotron-H).

Experts may work in a space that is smaller than the model's: rows are projected into it before they
are sent to experts, and their sum out of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headstart.models.feed_forward import Experts, Mixture, Router
from headstart.models.linear import Linear, Stack
from headstart.models.moe_config import MoeConfig


def squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x) squared."""
    return torch.relu(x).square()


class UngatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up = Linear(hidden, width)
        self.down = Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.down(squared(self.up(x)))
        assert isinstance(result, torch.Tensor)
        return result


class UngatedExperts(Experts):
    """The experts' matrices; `size` is that of the space they work in."""

    def __init__(self, config: MoeConfig, size: int):
        nn.Module.__init__(self)
        self.up = Stack(config.num_experts, size, config.width)
        self.down = Stack(config.num_experts, config.width, size)

    @property
    def first(self) -> Stack:
        return self.up

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return squared(x)


class UngatedMoE(Mixture):
    """Routed experts, and a shared one that every row passes through outside of their space."""

    def __init__(self, config: MoeConfig, hidden: int):
        super().__init__()
        self.router = Router(config, hidden)
        size = config.latent or hidden
        self.latent_in = Linear(hidden, size) if config.latent else None
        self.latent_out = Linear(size, hidden) if config.latent else None
        self.experts = UngatedExperts(config, size)
        self.shared = UngatedMLP(hidden, config.shared_width) if config.shared_width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        inner = x if self.latent_in is None else self.latent_in(x)
        result: Any = self.experts(inner, *self.router(x))
        if self.latent_out is not None:
            result = self.latent_out(result)
        if self.shared is not None:
            result = result + self.shared(x)
        assert isinstance(result, torch.Tensor)
        return result
