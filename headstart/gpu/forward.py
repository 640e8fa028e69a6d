"""Trunk and head through the kernels: the same modules, fused and ready for capture.

Rows are flat. Where a row goes (rotary position, place in the cache) and what it sees is given by
tensors, so nothing here waits for the device or decides anything on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.kernels.choice import choose_logits, choose_rows
from headstart.kernels.linear import gated_linear, partial_linear
from headstart.kernels.rows import add_norm, place_qkv, silu_product
from headstart.models.attention import LayerCache
from headstart.models.layers import DecoderLayer
from headstart.models.linear import Linear
from headstart.models.mtp import MTPModule
from headstart.models.rope import RotaryTable
from headstart.models.trunk import Trunk

# Up to so many rows reading the weights takes the time; beyond, arithmetic: libraries do it best.
MAX_SKINNY_ROWS = 16

Attend = Callable[[Tensor, LayerCache], Tensor]  # q [M, H, D] -> [M, H * D]


@dataclass(frozen=True)
class Rows:
    """M rows: rotary positions and places in the cache [M], and how their queries attend."""

    positions: Tensor
    places: Tensor
    attend: Attend


class Kernels:
    """Products by the skinny kernels for few rows, by the library for many."""

    def product(self, x: Tensor, layer: Linear) -> Tensor:
        """Partial sums [S, M, N] of x W^T; a bias is left to who adds them up."""
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return partial_linear(x, layer.weight)
        return self.whole(x, layer).unsqueeze(0)

    def whole(self, x: Tensor, layer: Linear) -> Tensor:
        """x W^T [M, N] in x's type, for many rows."""
        return torch.mm(x, layer.weight.t())

    def gated(self, x: Tensor, layer: Linear) -> Tensor:
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return gated_linear(x, layer.weight)
        return silu_product(self.whole(x, layer))

    def choose(
        self, x: Tensor, layer: Linear, heat: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Token ids [M] that the LM head `layer` and the noise choose."""
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return choose_rows(x, layer.weight, heat, seeds, positions, token_ids)
        return choose_logits(self.whole(x, layer), heat, seeds, positions, token_ids)

    def trunk(
        self, trunk: Trunk, ids: Tensor, rows: Rows, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """ids [M] -> the residual stream and its final norm, [M, D] each."""
        stream = trunk.embed[ids]
        layers = [layer for layer in trunk.layers if isinstance(layer, DecoderLayer)]
        norms = [*(layer.attention_norm for layer in layers[1:]), trunk.final_norm]
        normed = add_norm(stream, None, layers[0].attention_norm.weight, trunk.config.eps)
        for layer, cache, norm in zip(layers, caches, norms, strict=True):
            partial = self._layer(layer, stream, normed, rows, cache, trunk.rotary)
            normed = add_norm(stream, partial, norm.weight, trunk.config.eps)
        return stream, normed

    def head(
        self, module: MTPModule, embedded: Tensor, hidden: Tensor, rows: Rows,
        rotary: RotaryTable, cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """embedded and hidden [M, D] -> the state for the LM head and the recycled one."""
        layout = module.layout
        if layout.zero_embed_at_position_0:
            embedded = embedded.masked_fill((rows.positions == 0)[:, None], 0)
        token = add_norm(embedded, None, module.embed_norm.weight, module.embed_norm.eps)
        state = add_norm(hidden, None, module.hidden_norm.weight, module.hidden_norm.eps)
        pair = (token, state) if layout.fuse_order == "embed_first" else (state, token)
        fused = self.product(torch.cat(pair, dim=-1), module.fuse)
        stream = torch.zeros_like(embedded)
        block = module.block
        normed = add_norm(stream, fused, block.attention_norm.weight, block.attention_norm.eps)
        partial = self._layer(block, stream, normed, rows, cache, rotary)
        if module.out_norm is None:
            stream += partial.sum(0).to(stream.dtype)
            return stream, stream
        normed = add_norm(stream, partial, module.out_norm.weight, module.out_norm.eps)
        return normed, normed if layout.recycled_hidden == "after_out_norm" else stream

    def _layer(
        self, layer: DecoderLayer, stream: Tensor, normed: Tensor, rows: Rows, cache: LayerCache,
        rotary: RotaryTable,
    ) -> Tensor:  # fmt: skip
        """Attention is added to `stream`; the MLP's partial sums are left to the next norm."""
        attention = layer.attention
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = (attention.q_norm.weight, attention.k_norm.weight)
        q = place_qkv(
            self.product(normed, attention.qkv), attention.qkv.bias, norms,
            layer.attention_norm.eps, rotary.cos, rotary.sin, rows.positions, rows.places,
            cache.k, cache.v, attention.heads,
        )  # fmt: skip
        partial = self.product(rows.attend(q, cache), attention.o)
        normed = add_norm(stream, partial, layer.mlp_norm.weight, layer.mlp_norm.eps)
        return self.product(self.gated(normed, layer.mlp.gate_up), layer.mlp.down)


def why_unsupported(trunk: Trunk) -> str | None:
    """What in a trunk the kernels cannot run, or None."""
    config = trunk.config
    if config.o_bias or config.mlp_bias:
        return "the model has biases behind attention or in the MLP"
    if any(window is not None for window in config.windows):
        return "the model has sliding windows"
    if config.head_dim % 2 or config.head_dim > 256:
        return f"the model has heads of size {config.head_dim}"
    return None
