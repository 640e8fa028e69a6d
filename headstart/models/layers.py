"""The decoder layer that trunks and their heads share: a mixer, and a feed-forward part.

Some models have both in layers of their own (`MixerLayer`, `FeedLayer`), or norm what the parts
give and not what they read (`PostNormLayer`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headstart.models.attention import Context, EntryContext
from headstart.models.attention_config import AttentionShape
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.feed_forward import MLP, MoE
from headstart.models.kimi_delta import KimiDeltaAttention
from headstart.models.linear import Linear
from headstart.models.linear_attention import DeltaNet
from headstart.models.mamba import Mamba
from headstart.models.mla import LatentAttention
from headstart.models.norm import Norm
from headstart.models.recurrence import Recurrence
from headstart.models.rope import Rotation, rotate
from headstart.models.streams import Connection
from headstart.models.ungated import UngatedMLP, UngatedMoE

# what the rows of a layer see, or go on from; None where it looks at nothing but the row
LayerContext = Context | EntryContext | Recurrence | None


def norm(size: int, config: ModelConfig) -> Norm:
    return Norm(size, config.eps, centred=config.centred_norms)


class Attention(nn.Module):
    """Grouped-query attention with q, k and v in one product, and q's gates beside each q."""

    def __init__(self, config: ModelConfig, shape: AttentionShape):
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.dim
        self.v_dim, self.v_scale = shape.v_dim, config.v_scale
        self.is_gated = config.gated_attention
        self.sizes = [
            ((1 + self.is_gated) * self.heads + self.kv_heads) * self.dim,
            self.kv_heads * self.v_dim,
        ]
        self.qkv = Linear(config.hidden, sum(self.sizes), bias=config.qkv_bias)
        self.o = Linear(self.heads * self.v_dim, config.hidden, bias=config.o_bias)
        self.head_gate = Linear(config.hidden, self.heads) if config.head_gate else None
        self.q_norm = norm(self.dim, config) if config.qk_norm else None
        self.k_norm = norm(self.dim, config) if config.qk_norm else None
        self.sinks = (
            nn.Parameter(torch.empty(self.heads), requires_grad=False) if shape.has_sinks else None
        )

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: Context,
        window: int | None,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        both, v = torch.split(self.qkv(x), self.sizes, dim=-1)
        rows = both.view(x.shape[0], -1, self.dim)
        v = v.view(x.shape[0], -1, self.v_dim)
        gate = None
        if self.is_gated:  # of each head first its q, then its gate
            queries = rows[:, : 2 * self.heads]
            gate = queries[:, 1::2].flatten(1)
            rows = torch.cat([queries[:, ::2], rows[:, 2 * self.heads :]], dim=1)
        if self.q_norm is None or self.k_norm is None:
            q, k = torch.split(rotate(rows, *rotation), [self.heads, self.kv_heads], dim=1)
        else:
            q, k = torch.split(rows, [self.heads, self.kv_heads], dim=1)
            q, k = rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation)
        if self.v_scale != 1:
            v = v * self.v_scale
        seen = context.attend(q, k, v, window, self.sinks)
        if self.head_gate is not None:
            gate = self.head_gate(x).repeat_interleave(self.v_dim, dim=1)
        result = self.o(seen if gate is None else seen * gate.sigmoid())
        assert isinstance(result, torch.Tensor)
        return result


def feed_forward(config: ModelConfig, kind: LayerKind) -> MLP | MoE | UngatedMLP | UngatedMoE:
    """What follows the mixer in a layer of this kind."""
    if kind.feed == "moe":
        assert config.moe is not None
        if not config.gated_mlp:
            return UngatedMoE(config.moe, config.hidden)
        return MoE(config.moe, config.hidden, kind.limit, kind.shared_limit)
    if not config.gated_mlp:
        return UngatedMLP(config.hidden, config.intermediate)
    bias, limit = config.mlp_bias, kind.shared_limit
    return MLP(config.hidden, config.intermediate, bias=bias, limit=limit)


def connection(config: ModelConfig, kind: LayerKind) -> Connection | None:
    """How half a layer reads and writes the residual streams, where there are several."""
    if not kind.has_streams:
        return None
    assert config.streams is not None
    return Connection(config.streams, config.hidden)


Mixer = Attention | LatentAttention | DeltaNet | KimiDeltaAttention | Mamba


def mixer(config: ModelConfig, kind: LayerKind) -> Mixer:
    """What carries a row's context into it in a layer of this kind."""
    if kind.mixer == "latent":
        assert config.mla is not None
        has_indexer = kind.index == "own"
        return LatentAttention(config.hidden, config.num_heads, config.mla, has_indexer=has_indexer)
    if kind.mixer == "delta":
        assert config.delta is not None
        kind_of_net = KimiDeltaAttention if config.delta.by_channel else DeltaNet
        return kind_of_net(config.hidden, config.delta, config.eps)
    if kind.mixer == "mamba":
        assert config.mamba is not None
        return Mamba(config.hidden, config.mamba, config.eps)
    return Attention(config, config.shape(kind))


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward part, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__()
        self.attention_norm = norm(config.hidden, config)
        self.attention = mixer(config, kind)
        self.mlp_norm = norm(config.hidden, config)
        self.mlp = feed_forward(config, kind)
        # how each half reads and writes several residual streams
        self.attention_streams = connection(config, kind)
        self.mlp_streams = connection(config, kind)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: LayerContext,
        window: int | None = None,
    ) -> torch.Tensor:
        if self.attention_streams is None or self.mlp_streams is None:
            x = x + self.attention(self.attention_norm(x), rotation, context, window)
            x = x + self.mlp(self.mlp_norm(x))
            return x

        def attend(row: torch.Tensor) -> Any:
            return self.attention(self.attention_norm(row), rotation, context, window)

        x = self.attention_streams(x, attend)
        result = self.mlp_streams(x, lambda row: self.mlp(self.mlp_norm(row)))
        assert isinstance(result, torch.Tensor)
        return result


class MixerLayer(nn.Module):
    """A mixer alone behind its norm."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__()
        self.attention_norm = norm(config.hidden, config)
        self.attention = mixer(config, kind)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, context: LayerContext, window: int | None = None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, context, window)
        return x


class FeedLayer(nn.Module):
    """A feed-forward part alone behind its norm."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__()
        self.mlp_norm = norm(config.hidden, config)
        self.mlp = feed_forward(config, kind)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, context: LayerContext, window: int | None = None
    ) -> torch.Tensor:
        x = x + self.mlp(self.mlp_norm(x))
        return x


class PostNormLayer(nn.Module):
    """Both parts read the residual stream as it is; what they give is normed and added to it."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        super().__init__()
        self.attention = mixer(config, kind)
        self.attention_out_norm = norm(config.hidden, config)
        self.mlp = feed_forward(config, kind)
        self.mlp_out_norm = norm(config.hidden, config)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, context: LayerContext, window: int | None = None
    ) -> torch.Tensor:
        x = x + self.attention_out_norm(self.attention(x, rotation, context, window))
        x = x + self.mlp_out_norm(self.mlp(x))
        return x


AnyLayer = DecoderLayer | MixerLayer | FeedLayer | PostNormLayer


def layer_of(config: ModelConfig, kind: LayerKind) -> AnyLayer:
    """A layer of this kind."""
    if kind.norms == "after":
        return PostNormLayer(config, kind)
    if kind.mixer == "none":
        return FeedLayer(config, kind)
    return MixerLayer(config, kind) if kind.feed == "none" else DecoderLayer(config, kind)
