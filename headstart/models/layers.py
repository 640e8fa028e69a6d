"""The decoder layer that trunks and their heads share: a mixer, and a feed-forward part."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm

from headstart.models.attention import Context
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.linear import Linear
from headstart.models.mlp import MLP
from headstart.models.moe import MoE
from headstart.models.rope import Rotation, rotate


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


def feed_forward(config: ModelConfig, kind: LayerKind) -> MLP | MoE:
    """What follows the mixer in a layer of this kind."""
    if kind.feed == "moe":
        assert config.moe is not None
        return MoE(config.moe, config.hidden)
    return MLP(config.hidden, config.intermediate, bias=config.mlp_bias)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__()
        self.attention_norm = Norm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden, config.eps)
        self.mlp = feed_forward(config, kind)

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
