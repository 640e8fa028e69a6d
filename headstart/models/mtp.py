"""The multi-token-prediction head: fuse, block, norm, driven by the family's layout.

Module j at slot i consumes token x_i and a state that knows nothing after x_{i-1}: the trunk's
(module 0 of any head, every module of a parallel one) or the previous module's (a chained one).
Its rotary position is i - j - 1, so slots 0 to j stay empty. Logits and drafting live elsewhere.
"""

from __future__ import annotations

import torch
from torch import nn

from headstart.errors import UnsupportedFamily
from headstart.families.base import HeadLayout
from headstart.models.config import ModelConfig
from headstart.models.grouped_attention import norm
from headstart.models.layers import DecoderLayer, LayerContext, last_norm, layer_of
from headstart.models.linear import Linear
from headstart.models.rope import RotaryTable


class MTPModule(nn.Module):
    """One module of a head."""

    def __init__(self, config: ModelConfig, layout: HeadLayout):
        super().__init__()
        self.layout = layout
        self.embed_norm = norm(config.hidden, config)
        self.hidden_norm = norm(config.hidden, config)
        self.fuse = Linear(2 * config.hidden, config.hidden)
        self.block = layer_of(config, config.head_layer)
        self.window = config.shape(config.head_layer).window
        self.out_norm = norm(config.hidden, config) if layout.out_norm == "own" else None
        shares_lm_head = "lm_head" in layout.shares
        self.lm_head = None if shares_lm_head else Linear(config.hidden, config.vocab)
        self.rotary: RotaryTable | None = None  # where it rotates otherwise than the trunk

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rotary: RotaryTable,
        context: LayerContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded and hidden [T, D]; returns the state for the LM head and the recycled one.

        rows [N]: the only ones whose states are wanted, where the block is a plain `DecoderLayer`.
        """
        if self.layout.zero_embed_at_position_0:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0)
        token, state = self.embed_norm(embedded), self.hidden_norm(hidden)
        first = self.layout.fuse_order == "embed_first"
        x = self.fuse(torch.cat((token, state) if first else (state, token), dim=-1))
        rotation = (self.rotary or rotary).at(positions)
        if rows is None:
            x = self.block(x, rotation, context, self.window)
        else:
            x = self.block(x, rotation, context, self.window, rows=rows)
        normed = x if self.out_norm is None else self.out_norm(self._before_norm(x))
        recycled = normed if self.layout.recycled_hidden == "after_out_norm" else x
        return normed, recycled

    @property
    def decoder(self) -> DecoderLayer:
        """Its block, where kernels run it: they know one kind of layer."""
        assert isinstance(self.block, DecoderLayer)
        return self.block

    def _before_norm(self, x: torch.Tensor) -> torch.Tensor:
        """What the out norm is given; without its mean an RMS norm is a layer norm."""
        is_kept = self.layout.out_norm_mean == "kept"
        return x if is_kept else x - x.mean(dim=-1, keepdim=True)


class StreamModule(MTPModule):
    """A module that is fed all residual streams: a norm over them, or of each, a projection of
    each, and one of the token's embedding, which is added to every stream. It hands the streams
    on, and joins them by weights of its own for the LM head."""

    def __init__(self, config: ModelConfig, layout: HeadLayout):
        nn.Module.__init__(self)
        self.layout, self.hidden = layout, config.hidden
        self.embed_norm = norm(config.hidden, config)
        assert config.streams is not None
        by_stream = config.streams.kind != "gated"
        self.hidden_norm = norm(config.hidden if by_stream else config.state_size(layout), config)
        self.fuse_embed = Linear(config.hidden, config.hidden)
        self.fuse_hidden = Linear(config.hidden, config.hidden)
        self.block = layer_of(config, config.head_layer)
        self.hc_head = last_norm(config)
        self.out_norm, self.lm_head, self.rotary = None, None, None

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rotary: RotaryTable,
        context: LayerContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded [T, D], hidden [T, streams * D]."""
        assert rows is None, "rows of a module with streams go on together"
        if self.layout.zero_embed_at_position_0:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0)
        token = self.fuse_embed(self.embed_norm(embedded))
        normed = self.hidden_norm(hidden.reshape(-1, self.hidden_norm.weight.shape[0]))
        streams = self.fuse_hidden(normed.view(-1, self.hidden))
        x = (streams.view(len(hidden), -1, self.hidden) + token.unsqueeze(1)).flatten(1)
        x = self.block(x, (self.rotary or rotary).at(positions), context)
        return self.hc_head(x), x


class MTPHead(nn.Module):
    """All modules of a head, with the LM head they share or have."""

    def __init__(self, config: ModelConfig, layout: HeadLayout, num_modules: int):
        super().__init__()
        carried = (
            layout.fuse_order == "summed",
            layout.trunk_hidden == "before_hc_head",
            layout.recycled_hidden == "streams",
        )
        # gates norm what they join
        has_gates = config.streams is not None and config.streams.kind == "gated"
        out_norm = "none" if has_gates else "own"
        is_carried = all(carried) and config.streams is not None and layout.out_norm == out_norm
        if (
            layout.zero_centred_norms != config.centred_norms
            or layout.out_norm == "shared"
            or (any(carried) and not is_carried)
        ):
            raise UnsupportedFamily("this kind of head is not run by the embedded engine yet.")
        self.layout, self.config = layout, config
        kind = StreamModule if any(carried) else MTPModule
        self.modules_ = nn.ModuleList(kind(config, layout) for _ in range(num_modules))

    @property
    def num_modules(self) -> int:
        return len(self.modules_)

    @property
    def own_lm_heads(self) -> list[Linear]:
        """Of modules that do not share the trunk's, in their order."""
        found = [module.lm_head for module in self.modules_ if isinstance(module, MTPModule)]
        return [lm_head for lm_head in found if lm_head is not None]

    def rotate_by(self, table: RotaryTable) -> None:
        """Rotate by a table of the head's own, where it does so otherwise than the trunk."""
        for module in self.modules_:
            module.rotary = table

    def module(self, depth: int) -> MTPModule:
        """The module that drafts at `depth` (from 1): the last one again beyond its count."""
        found = self.modules_[min(depth, self.num_modules) - 1]
        assert isinstance(found, MTPModule)
        return found
