"""The decoder layer that trunks and their heads share: a mixer, and a feed-forward part.

Some models have both in layers of their own (`MixerLayer`, `FeedLayer`), or norm what the parts
give and not what they read (`PostNormLayer`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headstart.models.attention import Context, EntryContext
from headstart.models.compressed_attention import CompressedAttention
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.feed_forward import MLP, MoE
from headstart.models.gated_streams import GatedConnection, GatedJoin
from headstart.models.grouped_attention import Attention, norm
from headstart.models.indexed_attention import IndexedAttention
from headstart.models.kimi_delta import KimiDeltaAttention
from headstart.models.linear_attention import DeltaNet
from headstart.models.mamba import Mamba
from headstart.models.mla import LatentAttention
from headstart.models.ngram_embedding import NgramEmbedding
from headstart.models.norm import Norm
from headstart.models.recurrence import Recurrence
from headstart.models.rope import Rotation
from headstart.models.streams import Connection, Joined
from headstart.models.ungated import UngatedMLP, UngatedMoE

# what the rows of a layer see, or go on from; None where it looks at nothing but the row
LayerContext = Context | EntryContext | Recurrence | None


def feed_forward(config: ModelConfig, kind: LayerKind) -> MLP | MoE | UngatedMLP | UngatedMoE:
    """What follows the mixer in a layer of this kind."""
    if kind.feed == "moe":
        assert config.moe is not None
        if not config.gated_mlp:
            return UngatedMoE(config.moe, config.hidden)
        vocab = config.vocab if kind.routes_by_token else 0
        return MoE(config.moe, config.hidden, kind.limit, kind.shared_limit, vocab=vocab)
    if not config.gated_mlp:
        return UngatedMLP(config.hidden, config.intermediate)
    bias, limit = config.mlp_bias, kind.shared_limit
    return MLP(config.hidden, config.intermediate, bias=bias, limit=limit)


def connection(config: ModelConfig, kind: LayerKind) -> Connection | GatedConnection | None:
    """How half a layer reads and writes the residual streams, where there are several."""
    if not kind.has_streams:
        return None
    assert config.streams is not None
    if config.streams.kind == "gated":
        return GatedConnection(config.streams, config.hidden)
    return Connection(config.streams, config.hidden)


def last_norm(config: ModelConfig) -> Norm | Joined | GatedJoin:
    """What makes the row that the LM head reads of the residual stream, or of several."""
    if config.streams is None:
        return norm(config.hidden, config)
    if config.streams.kind == "gated":
        return GatedJoin(config.streams, config.hidden)
    return Joined(config.streams, config.hidden, norm(config.hidden, config))


Mixer = (
    Attention | IndexedAttention | LatentAttention | CompressedAttention | DeltaNet
    | KimiDeltaAttention | Mamba
)  # fmt: skip


def mixer(config: ModelConfig, kind: LayerKind) -> Mixer:
    """What carries a row's context into it in a layer of this kind."""
    if kind.mixer == "latent":
        assert config.mla is not None
        has_indexer = kind.index == "own"
        return LatentAttention(config.hidden, config.num_heads, config.mla, has_indexer=has_indexer)
    if kind.mixer == "compressed":
        assert config.compressed is not None
        size, chooses = kind.window_size, kind.index == "own"
        return CompressedAttention(
            config.hidden, config.num_heads, config.compressed, size=size, chooses=chooses
        )
    if kind.mixer == "delta":
        assert config.delta is not None
        kind_of_net = KimiDeltaAttention if config.delta.by_channel else DeltaNet
        return kind_of_net(config.hidden, config.delta, config.eps)
    if kind.mixer == "indexed":
        return IndexedAttention(config, kind)
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
        tokens: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`tokens` [T]: the rows' own, where they say which experts a row has. `rows` [N]: those
        that go on, for which the context attends; the others are only seen by them."""

        def attend(row: torch.Tensor) -> Any:
            return self.attention(self.attention_norm(row), rotation, context, window)

        def feed(row: torch.Tensor) -> Any:
            own = () if tokens is None else (tokens,)
            return self.mlp(self.mlp_norm(row), *own)

        if rows is not None:
            normed = self.attention_norm(x)
            x = x[rows] + self.attention(normed, rotation, context, window, rows)
            x = x + feed(x)
            return x
        if self.attention_streams is None or self.mlp_streams is None:
            x = x + attend(x)
            x = x + feed(x)
            return x
        x = self.attention_streams(x, attend)
        result = self.mlp_streams(x, feed)
        assert isinstance(result, torch.Tensor)
        return result


class GatedLayer(DecoderLayer):
    """The same where gates over several streams norm what both halves read."""

    def __init__(self, config: ModelConfig, kind: LayerKind):
        nn.Module.__init__(self)
        self.attention = mixer(config, kind)
        self.mlp = feed_forward(config, kind)
        self.attention_streams = connection(config, kind)
        self.mlp_streams = connection(config, kind)
        self.ngrams = None
        if kind.has_ngrams and config.ngrams is not None and config.streams is not None:
            self.ngrams = NgramEmbedding(config.ngrams, config.streams, config.hidden)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: LayerContext,
        window: int | None = None,
        tokens: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self.attention_streams is not None and self.mlp_streams is not None
        assert rows is None, "rows of a layer with streams go on together"
        x = self.attention_streams(x, lambda row: self.attention(row, rotation, context, window))
        result = self.mlp_streams(x, self.mlp)
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
    streams = config.streams if kind.has_streams else None
    if streams is not None and streams.kind == "gated":
        return GatedLayer(config, kind)
    if kind.norms == "after":
        return PostNormLayer(config, kind)
    if kind.mixer == "none":
        return FeedLayer(config, kind)
    return MixerLayer(config, kind) if kind.feed == "none" else DecoderLayer(config, kind)
