"""The decoder layer that trunks and their heads share: a mixer, and a feed-forward part."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm

from headstart.models.attention import Context
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.linear import Linear
from headstart.models.linear_attention import DeltaNet
from headstart.models.mlp import MLP
from headstart.models.moe import MoE
from headstart.models.recurrence import Recurrence
from headstart.models.rope import Rotation, rotate


class Norm(nn.Module):
    """RMSNorm over the last axis; a centred one stores how far its weight is from 1."""

    def __init__(self, size: int, eps: float, *, centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.centred = eps, centred
        self._factor: torch.Tensor | None = None

    @property
    def factor(self) -> torch.Tensor:
        """What normed rows are multiplied with, for kernels; weights must not change any more."""
        if not self.centred:
            return self.weight
        if self._factor is None or self._factor.device != self.weight.device:
            self._factor = 1 + self.weight.float()
        return self._factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.centred:
            return rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # 1 + w in half precision would lose most of what w says.
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = rms_norm(x.to(wide), (x.shape[-1],), 1 + self.weight.to(wide), self.eps)
        return normed.to(x.dtype)


def norm(size: int, config: ModelConfig) -> Norm:
    return Norm(size, config.eps, centred=config.centred_norms)


class Attention(nn.Module):
    """Grouped-query attention with q, k and v in one product, and q's gates beside each q."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.is_gated = config.gated_attention
        rows = ((1 + self.is_gated) * self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = Linear(config.hidden, rows, bias=config.qkv_bias)
        self.o = Linear(self.heads * self.dim, config.hidden, bias=config.o_bias)
        self.q_norm = norm(self.dim, config) if config.qk_norm else None
        self.k_norm = norm(self.dim, config) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: Context,
        window: int | None,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        rows = self.qkv(x).view(x.shape[0], -1, self.dim)
        gate = None
        if self.is_gated:  # of each head first its q, then its gate
            both = rows[:, : 2 * self.heads]
            gate = both[:, 1::2].flatten(1)
            rows = torch.cat([both[:, ::2], rows[:, 2 * self.heads :]], dim=1)
        q, k, v = torch.split(rows, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is None or self.k_norm is None:
            both = rotate(rows[:, : self.heads + self.kv_heads], *rotation)
            q, k = torch.split(both, [self.heads, self.kv_heads], dim=1)
        else:
            q, k = rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation)
        seen = context.attend(q, k, v, window)
        result = self.o(seen if gate is None else seen * gate.sigmoid())
        assert isinstance(result, torch.Tensor)
        return result


def feed_forward(config: ModelConfig, kind: LayerKind) -> MLP | MoE:
    """What follows the mixer in a layer of this kind."""
    if kind.feed == "moe":
        assert config.moe is not None
        return MoE(config.moe, config.hidden)
    return MLP(config.hidden, config.intermediate, bias=config.mlp_bias)


def mixer(config: ModelConfig, kind: LayerKind) -> Attention | DeltaNet:
    """What carries a row's context into it in a layer of this kind."""
    if kind.mixer == "delta":
        assert config.delta is not None
        return DeltaNet(config.hidden, config.delta, config.eps)
    return Attention(config)


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward part, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__()
        self.attention_norm = norm(config.hidden, config)
        self.attention = mixer(config, kind)
        self.mlp_norm = norm(config.hidden, config)
        self.mlp = feed_forward(config, kind)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: Context | Recurrence,
        window: int | None = None,
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, context, window)
        x = x + self.mlp(self.mlp_norm(x))
        return x
