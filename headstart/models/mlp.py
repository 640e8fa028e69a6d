"""The gated feed-forward part of a layer, and of what all tokens share among experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from headstart.models.linear import Linear


class MLP(nn.Module):
    """SwiGLU with gate and up in one product."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False):
        super().__init__()
        self.gate_up = Linear(hidden, 2 * width, bias=bias)
        self.down = Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result = self.down(gated(gate, up))
        assert isinstance(result, torch.Tensor)
        return result


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, without a third tensor where no gradient needs it."""
    return silu(gate) * up if gate.requires_grad else silu(gate).mul_(up)
