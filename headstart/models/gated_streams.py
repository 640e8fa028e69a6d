"""Residual streams whose channels are weighed one by one (Qwen3.8-Flash-Next).

Every stream is normed, and a gate of low rank over all of them says how much of each channel counts
to the one row that half a layer takes. What that makes is added to each stream, times a number of
its own. The same gates join the streams at the end, in place of a final norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from headstart.models.linear import Linear
from headstart.models.norm import Norm
from headstart.models.streams import Half, StreamConfig


class StreamNorm(Norm):
    """RMSNorm of each stream by itself, with weights for all of them."""

    def __init__(self, count: int, hidden: int, eps: float):
        super().__init__(count * hidden, eps, centred=True)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """x [T, S * hidden]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        streams = x.to(wide).view(len(x), self.count, -1)
        scale = torch.rsqrt(streams.square().mean(dim=-1, keepdim=True) + self.eps)
        return ((streams * scale).flatten(1) * (1 + self.weight.to(wide))).to(x.dtype)


class StreamGates(nn.Module):
    """The streams, normed, and one row of them."""

    def __init__(self, config: StreamConfig, hidden: int):
        super().__init__()
        self.count = config.count
        self.norm = StreamNorm(config.count, hidden, config.norm_eps)
        self.down = Linear(config.count * hidden, config.rank)
        self.up = Linear(config.rank, config.count * hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, S * hidden] -> [T, hidden] and the normed streams."""
        normed = self.norm(x)
        gates = self.up(silu(self.down(normed) / self.count)).sigmoid()
        return (gates * normed).view(len(x), self.count, -1).mean(dim=1), normed


class GatedConnection(nn.Module):
    """How one half of a layer reads and writes the streams."""

    def __init__(self, config: StreamConfig, hidden: int):
        super().__init__()
        self.count = config.count
        self.gates = StreamGates(config, hidden)
        self.inject = Linear(config.count * hidden, config.count)

    def forward(self, x: Tensor, run: Half) -> Tensor:
        """x [T, S * hidden] -> the same, with what `run` makes of it."""
        row, normed = self.gates(x)
        given = 2 * (self.inject(normed) / self.count).sigmoid()
        result = x + (run(row).unsqueeze(1) * given.unsqueeze(-1)).flatten(1)
        assert isinstance(result, Tensor)
        return result


class GatedJoin(nn.Module):
    """The streams as one row that an LM head reads."""

    def __init__(self, config: StreamConfig, hidden: int):
        super().__init__()
        self.gates = StreamGates(config, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, S * hidden] -> [T, hidden]."""
        row: Tensor = self.gates(x)[0]
        return row
