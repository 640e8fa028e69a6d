"""The gated delta net: a layer whose context is a state of constant size instead of keys.

Projections, a short convolution, the delta rule, and a norm under a gate. What a row goes on from
is the business of its `Recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu, softplus

from headstart.models.delta_config import DeltaConfig
from headstart.models.delta_rule import DeltaRows
from headstart.models.linear import Linear
from headstart.models.recurrence import Recurrence
from headstart.models.rope import Rotation

_TINY = 1e-6  # keeps the length of a zero key from dividing by zero, as published


class DeltaNet(nn.Module):
    """All input projections in one product: convolved channels, output gate, b and a."""

    def __init__(self, hidden: int, config: DeltaConfig, eps: float):
        super().__init__()
        self.config, self.eps = config, eps
        self.sizes = [config.channels, config.values, config.v_heads, config.v_heads]
        self.inputs = Linear(hidden, sum(self.sizes))
        self.conv = nn.Parameter(
            torch.empty(config.channels, 1, config.kernel), requires_grad=False
        )
        self.a_log = nn.Parameter(torch.empty(config.v_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(config.v_heads), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(config.v_dim), requires_grad=False)
        self.out = Linear(config.values, hidden)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Both stay in fp32 when the model does not: decays are exponentials of them."""
        nn.Module._apply(self, fn, recurse)
        for parameter in (self.a_log, self.dt_bias):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        return self

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None, context: Recurrence, window: None = None
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; positions do not matter to it, only the order of rows."""
        mixed, gate, b, a = torch.split(self.inputs(x), self.sizes, dim=-1)
        mixed = silu(context.convolve(mixed, self.conv.squeeze(1)))
        result = context.recur(self._rows(mixed, b, a)).to(x.dtype)
        normed = rms_norm(result, (self.config.v_dim,), self.norm, self.eps).flatten(1)
        opened = silu(gate) if self.config.gate == "silu" else gate.sigmoid()
        result = self.out(normed * opened)
        assert isinstance(result, torch.Tensor)
        return result

    def _rows(self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> DeltaRows:
        config, count = self.config, mixed.shape[0]
        wide = torch.promote_types(mixed.dtype, torch.float32)
        keys = config.k_heads * config.k_dim
        q, k, v = torch.split(mixed.to(wide), [keys, keys, config.values], dim=-1)
        group = config.v_heads // config.k_heads
        q, k = (
            unit(part.reshape(count, config.k_heads, config.k_dim)).repeat_interleave(group, 1)
            for part in (q, k)
        )
        rate = softplus(a.to(wide) + self.dt_bias.to(wide))
        return DeltaRows(
            q * config.k_dim**-0.5,
            k,
            v.reshape(count, config.v_heads, config.v_dim),
            -self.a_log.to(wide).exp() * rate,
            b.to(wide).sigmoid(),
        )


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY)
