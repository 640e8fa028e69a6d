"""The decoder layer that dense trunks and their heads share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from headstart.models.attention import Context
from headstart.models.config import ModelConfig
from headstart.models.linear import Linear
from headstart.models.rope import rotate

Rotation = tuple[torch.Tensor, torch.Tensor]


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with q, k and v in one product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = Linear(config.hidden, rows, bias=config.qkv_bias)
        self.o = Linear(self.heads * self.dim, config.hidden, bias=config.o_bias)
        self.q_norm = Norm(self.dim, config.eps) if config.qk_norm else None
        self.k_norm = Norm(self.dim, config.eps) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: Context,
        window: int | None,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        rows = self.qkv(x).view(x.shape[0], -1, self.dim)
        q, k, v = torch.split(rows, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is None or self.k_norm is None:
            both = rotate(rows[:, : self.heads + self.kv_heads], *rotation)
            q, k = torch.split(both, [self.heads, self.kv_heads], dim=1)
        else:
            q, k = rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation)
        result = self.o(context.attend(q, k, v, window))
        assert isinstance(result, torch.Tensor)
        return result


class MLP(nn.Module):
    """SwiGLU with gate and up in one product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = Linear(config.hidden, 2 * config.intermediate, bias=config.mlp_bias)
        self.down = Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result = self.down(silu(gate) * up if gate.requires_grad else silu(gate).mul_(up))
        assert isinstance(result, torch.Tensor)
        return result


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = Norm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: Context,
        window: int | None = None,
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, context, window)
        x = x + self.mlp(self.mlp_norm(x))
        return x
