"""A trunk: embedding, layers, final norm, LM head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headstart.models.config import ModelConfig
from headstart.models.layers import DecoderLayer, GatedLayer, LayerContext, last_norm, layer_of
from headstart.models.linear import Linear
from headstart.models.mla import LatentAttention
from headstart.models.rope import RotaryTable


class Trunk(nn.Module):
    """Flat rows in, hidden states out; logits are asked for separately, and only where needed."""

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab, config.hidden), requires_grad=False)
        self.layers = nn.ModuleList(layer_of(config, kind) for kind in config.layers)
        self._share_indexers()
        self.final_norm = last_norm(config)
        self.lm_head = Linear(config.hidden, config.vocab)
        if config.is_tied:
            self.lm_head.weight = self.embed
        self.rotate_up_to(max_len, dtype)

    def _share_indexers(self) -> None:
        """A layer without an indexer sees what the last one before it chose."""
        leader = None
        for layer, kind in zip(self.layers, self.config.layers, strict=True):
            if kind.index == "none":
                continue
            assert isinstance(layer, DecoderLayer)
            if kind.index == "own":
                leader = layer.attention
            elif isinstance(leader, LatentAttention):
                assert isinstance(layer.attention, LatentAttention)
                layer.attention.follow(leader)

    def rotate_up_to(self, max_len: int, dtype: torch.dtype) -> None:
        """Tables of positions below `max_len`: for all layers, or for those with no window."""
        config, sliding = self.config, self.config.sliding
        self.rotary = RotaryTable(config.rope, max_len, dtype)
        self.sliding_rotary = None if sliding is None else RotaryTable(sliding.rope, max_len, dtype)
        far = None if config.compressed is None else config.compressed.far_rope
        self.far_rotary = None if far is None else RotaryTable(far, max_len, dtype)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        contexts: Sequence[LayerContext],
    ) -> torch.Tensor:
        """ids and positions [T] -> the residual stream [T, hidden] before the final norm, or all
        streams [T, streams * hidden] where there are several.

        One context per layer says what its rows attend to, or go on from.
        """
        x = self.embed[ids]
        if self.config.streams is not None:
            x = x.repeat(1, self.config.streams.count)
        config, rotation = self.config, self.rotary.at(positions)
        near = rotation if self.sliding_rotary is None else self.sliding_rotary.at(positions)
        far = rotation if self.far_rotary is None else self.far_rotary.at(positions)
        rows = zip(self.layers, config.layers, contexts, config.windows, strict=True)
        for layer, kind, context, window in rows:
            if kind.has_ngrams:
                assert isinstance(layer, GatedLayer) and layer.ngrams is not None
                x = x + layer.ngrams(x, ids, context)
            turn = near if kind.mixer == "sliding" else far if kind.window_size else rotation
            own = (ids,) if kind.routes_by_token else ()
            x = layer(x, turn, context, window, *own)
        return x

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """LM head over states after the final norm; at least fp32."""
        result = self.lm_head(normed)
        assert isinstance(result, torch.Tensor)
        return result if result.dtype == torch.float64 else result.float()
