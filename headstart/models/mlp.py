"""The gated feed-forward part of a layer, and of what all tokens share among experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from headstart.models.linear import Linear


class MLP(nn.Module):
    """SwiGLU with gate and up in one product."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False, limit: float | None = None):
        super().__init__()
        self.limit = limit
        self.gate_up = Linear(hidden, 2 * width, bias=bias)
        self.down = Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result = self.down(gated(gate, up, self.limit))
        assert isinstance(result, torch.Tensor)
        return result


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up, without a third tensor where no gradient needs it; each within a limit."""
    if limit is not None:
        return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    return silu(gate) * up if gate.requires_grad else silu(gate).mul_(up)
