"""Trunk and head through the kernels: the same modules, fused and ready for capture.

Rows are flat. Where a row goes (rotary position, place in the cache) and what it sees is given by
tensors, so nothing here waits for the device or decides anything on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.backends.cuda.attending import Attend, Sight, packed, paged
from headstart.backends.cuda.experts import moe_terms
from headstart.backends.cuda.int8 import Int8Rows
from headstart.backends.cuda.kernels import int8_choice, streamed
from headstart.backends.cuda.kernels.choice import choose_logits, choose_rows
from headstart.backends.cuda.kernels.eight_bits import Fp8Rows
from headstart.backends.cuda.kernels.gates import gate_heads, gate_rows
from headstart.backends.cuda.kernels.inputs import embed_rows, pair_rows
from headstart.backends.cuda.kernels.int8 import gated_int8, partial_int8
from headstart.backends.cuda.kernels.latent_rows import Turn
from headstart.backends.cuda.kernels.linear import gated_linear, partial_linear
from headstart.backends.cuda.kernels.rows import (
    add_norm,
    begin_norm,
    place_qkv,
    silu_product,
)
from headstart.backends.cuda.latent import (
    LatentAttend,
    paged_latent,
    place_latents,
    queries_of,
)
from headstart.backends.cuda.quantized import KernelFp8, KernelLinear, add_norm_for
from headstart.models.attention import LayerCache
from headstart.models.feed_forward import MLP, MoE
from headstart.models.grouped_attention import Attention
from headstart.models.layers import DecoderLayer
from headstart.models.linear import Linear
from headstart.models.linear_attention import DeltaNet
from headstart.models.mla import LatentAttention
from headstart.models.mtp import MTPModule
from headstart.models.norm import Norm
from headstart.models.rope import RotaryTable
from headstart.models.trunk import Trunk

# Up to so many rows each weight is multiplied as it comes; more want larger tiles (`streamed`), and
# from some point on arithmetic takes the time, which libraries do best.
MAX_SKINNY_ROWS = 16

# a recurrent layer, its number among them, its rows [M, D] -> partial sums [S, M, D]
Recur = Callable[[DeltaNet, int, Tensor], Tensor]


@dataclass(frozen=True)
class Rows:
    """M rows: rotary positions and slots of the K/V cache [M], and how their queries attend.

    `recur`: how they go on in a recurrent layer, where a trunk has any; `latent`: how they attend
    where latents are kept.
    """

    positions: Tensor
    kv_slots: Tensor
    attend: Attend
    recur: Recur | None = None
    latent: LatentAttend | None = None


class Kernels:
    """Products by our kernels while reading weights takes the time, then by the library."""

    heads_each: int | None = None  # of a program that finishes q, k, v; None: by how many rows
    always_processes = False  # whether choices that need no processing go the way of the others
    paged = staticmethod(paged)
    packed = staticmethod(packed)
    paged_latent = staticmethod(paged_latent)

    def product(self, x: Tensor, layer: Linear) -> Tensor:
        """Partial sums [S, M, N] of x W^T; a bias is left to what adds them up."""
        if isinstance(layer, KernelLinear):
            return layer.partial(x)
        if isinstance(layer.int8, Int8Rows) and x.shape[0] <= MAX_SKINNY_ROWS:
            return partial_int8(x, layer.int8.weight, layer.int8.scales)
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return partial_linear(x, layer.weight)
        if streamed.takes(x, layer.weight):
            return streamed.streamed_linear(x, layer.weight)
        return self.whole(x, layer).unsqueeze(0)

    def whole(self, x: Tensor, layer: Linear) -> Tensor:
        """x W^T [M, N] in x's type, for many rows."""
        if isinstance(layer, KernelLinear):
            return layer.whole(x)
        return torch.mm(x, layer.weight.t())

    def logits(self, x: Tensor, lm_head: Linear) -> Tensor:
        """[S, M, N], whose sum over S is x W^T, for a choice that needs them all."""
        rounded = lm_head.int8
        is_wide = x.shape[0] > MAX_SKINNY_ROWS
        if isinstance(rounded, Int8Rows) and is_wide and int8_choice.takes(x):
            return int8_choice.logits_streamed(x, rounded.weight, rounded.scales).unsqueeze(0)
        return self.product(x, lm_head)

    def gated(self, x: Tensor, layer: Linear) -> Tensor:
        """silu(x G^T) * (x U^T) [M, N / 2] in x's type; the layer holds G's rows, then U's."""
        if isinstance(layer, KernelLinear):
            return layer.gated(x)
        if isinstance(layer.int8, Int8Rows) and x.shape[0] <= MAX_SKINNY_ROWS:
            return gated_int8(x, layer.int8.weight, layer.int8.scales)
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return gated_linear(x, layer.weight)
        if streamed.takes(x, layer.weight):
            return streamed.streamed_gated(x, layer.weight)
        return silu_product(self.whole(x, layer))

    def choose(
        self, x: Tensor, layer: Linear, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Token ids [M] that the LM head `layer` and the noise choose."""
        if isinstance(layer, KernelLinear):
            return layer.choose(x, inv_temps, seeds, positions, token_ids)
        rounded, by_int8 = layer.int8, int8_choice.chooser_for(x)
        if isinstance(rounded, Int8Rows) and by_int8 is not None:
            return by_int8(
                x, rounded.weight, rounded.scales, inv_temps, seeds, positions, token_ids
            )
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return choose_rows(x, layer.weight, inv_temps, seeds, positions, token_ids)
        return choose_logits(self.whole(x, layer), inv_temps, seeds, positions, token_ids)

    def trunk(
        self, trunk: Trunk, ids: Tensor, rows: Rows, caches: list[LayerCache],
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """ids [M] -> the residual stream and its final norm, [M, D] each; or of the rows `kept`.

        There is a cache for every layer that attends. Rows that are not kept end once the last
        layer has attended.
        """
        layers = [layer for layer in trunk.layers if isinstance(layer, DecoderLayer)]
        assert isinstance(trunk.final_norm, Norm)
        norms = [*(layer.attention_norm for layer in layers[1:]), trunk.final_norm]
        readers = [*(_reader_of(layer) for layer in layers[1:]), None]
        normed: Tensor | Fp8Rows
        stream, normed = embed_rows(
            ids, trunk.embed, layers[0].attention_norm.factor, trunk.config.eps
        )
        attending, num_recurrent = iter(caches), 0
        config = trunk.config
        whole = zip(layers, norms, readers, config.layers, config.windows, strict=True)
        for layer, norm, reader, kind, window in whole:
            if isinstance(layer.attention, DeltaNet):
                assert rows.recur is not None and isinstance(normed, Tensor)
                mixed = rows.recur(layer.attention, num_recurrent, normed)
                num_recurrent += 1
            else:
                near = trunk.sliding_rotary if kind.mixer == "sliding" else None
                rotary = near or trunk.rotary
                mixed = self._attend(layer, normed, rows, next(attending), rotary, window)
            kv_slots = rows.kv_slots
            if kept is not None and layer is layers[-1]:
                stream, mixed, kv_slots = stream[kept], mixed[:, kept], kv_slots[kept]
            partial = self._feed_after(layer, stream, mixed, kv_slots)
            normed = add_norm_for(reader, stream, partial, norm.factor, trunk.config.eps)
        assert isinstance(normed, Tensor), "the LM head reads numbers as they are"
        return stream, normed

    def head(
        self, module: MTPModule, ids: Tensor, states: Tensor, rows: Rows, embed: Tensor,
        rotary: RotaryTable, cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """ids [B, R] and states [B, R, D] -> the state for the LM head and the recycled one."""
        layout, block = module.layout, module.decoder
        stream, normed = self._enter_head(module, ids, states, rows, embed)
        own = module.rotary or rotary
        mixed = self._attend(block, normed, rows, cache, own, module.window)
        partial = self._feed_after(block, stream, mixed, rows.kv_slots)
        if module.out_norm is None:
            stream += partial.sum(0).to(stream.dtype)
            return stream, stream
        normed = add_norm(stream, partial, module.out_norm.factor, module.out_norm.eps)
        return normed, normed if layout.recycled_hidden == "after_out_norm" else stream

    def fill_head(
        self, module: MTPModule, ids: Tensor, states: Tensor, rows: Rows, embed: Tensor,
        rotary: RotaryTable, cache: LayerCache,
    ) -> None:  # fmt: skip
        """Keys and values of the same rows, where no output of them is wanted."""
        _, normed = self._enter_head(module, ids, states, rows, embed)
        attention, own = module.decoder.attention, module.rotary or rotary
        if isinstance(attention, LatentAttention):
            place_latents(self.product, attention, normed, _turn(own, rows), rows.kv_slots, cache)
        else:
            self._place(module.decoder, normed, rows, cache, own)

    def _enter_head(
        self, module: MTPModule, ids: Tensor, states: Tensor, rows: Rows, embed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The stream that token and state are fused to, and its norm."""
        layout, block = module.layout, module.decoder
        pair = pair_rows(
            ids, states, embed, (module.embed_norm.factor, module.hidden_norm.factor),
            rows.positions, module.embed_norm.eps, embed_first=layout.fuse_order == "embed_first",
            zero_first=layout.zero_embed_at_position_0,
        )  # fmt: skip
        fused = self.product(pair, module.fuse)
        return begin_norm(fused, block.attention_norm.factor, block.attention_norm.eps, embed.dtype)

    def _attend(
        self, layer: DecoderLayer, normed: Tensor | Fp8Rows, rows: Rows, cache: LayerCache,
        rotary: RotaryTable, window: int | None,
    ) -> Tensor:  # fmt: skip
        """Partial sums of a layer's attention."""
        attention = layer.attention
        if isinstance(attention, LatentAttention):
            assert rows.latent is not None and isinstance(normed, Tensor)
            turn = _turn(rotary, rows)
            source = place_latents(self.product, attention, normed, turn, rows.kv_slots, cache)
            queries = queries_of(self.product, attention, normed, source, turn)
            return self.product(rows.latent(queries, cache), attention.o)
        assert isinstance(attention, Attention), "other mixers are refused"
        q, product = self._place(layer, normed, rows, cache, rotary)
        seen = rows.attend(q, cache, Sight(window, attention.sinks))
        if attention.is_gated:
            seen = gate_rows(seen, product, attention.dim)
        if attention.head_gate is not None:
            assert isinstance(normed, Tensor), "two matrices read it"
            by_head = seen.view(len(seen), attention.heads, attention.v_dim)
            gate_heads(by_head, self.product(normed, attention.head_gate))
        return self.product(seen, attention.o)

    def _place(
        self, layer: DecoderLayer, normed: Tensor | Fp8Rows, rows: Rows, cache: LayerCache,
        rotary: RotaryTable,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Keys and values go to the cache; the queries, and the product that all came from."""
        attention = layer.attention
        assert isinstance(attention, Attention), "other mixers are refused"
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = (attention.q_norm.factor, attention.k_norm.factor)
        if isinstance(normed, Fp8Rows):
            assert isinstance(attention.qkv, KernelFp8)
            product = attention.qkv.partial(normed)
        else:
            product = self.product(normed, attention.qkv)
        q = place_qkv(
            product, attention.qkv.bias, norms, layer.attention_norm.eps, rotary.cos, rotary.sin,
            rows.positions, rows.kv_slots, cache.k, cache.v, attention.heads, each=self.heads_each,
            is_interleaved=rotary.is_interleaved, is_gated=attention.is_gated, sizes=cache.sizes,
            dtype=cache.dtype, v_scale=attention.v_scale,
        )  # fmt: skip
        return q, product

    def _feed_after(
        self, layer: DecoderLayer, stream: Tensor, mixed: Tensor, kv_slots: Tensor
    ) -> Tensor:
        """What the mixer gave is added to `stream`; what follows leaves its terms to the norm."""
        mlp, norm = layer.mlp, layer.mlp_norm
        assert isinstance(mlp, MLP | MoE)
        if isinstance(mlp, MLP) and isinstance(mlp.gate_up, KernelFp8):
            normed = add_norm_for(mlp.gate_up, stream, mixed, norm.factor, norm.eps)
            if isinstance(mlp.down, KernelLinear):
                return mlp.down.partial(mlp.gate_up.gated_for(normed, mlp.down))
            return self.product(mlp.gate_up.gated(normed), mlp.down)
        return self.feed(add_norm(stream, mixed, norm.factor, norm.eps), mlp, kv_slots)

    def feed(self, x: Tensor, mlp: MLP | MoE, kv_slots: Tensor) -> Tensor:
        """Partial sums [S, M, N] of what follows the mixer in a layer."""
        if isinstance(mlp, MoE):
            return moe_terms(x, mlp, kv_slots, lambda own, shared: self.feed(own, shared, kv_slots))
        gate_up, down = mlp.gate_up, mlp.down
        if isinstance(gate_up, KernelLinear) and isinstance(down, KernelLinear):
            return down.partial(gate_up.gated_for(x, down))
        return self.product(self.gated(x, gate_up), down)


def _reader_of(layer: DecoderLayer) -> Linear | None:
    """The only matrix that reads the norm before a layer's mixer, or None."""
    attention = layer.attention
    if not isinstance(attention, Attention) or attention.head_gate is not None:
        return None
    return attention.qkv


def _turn(rotary: RotaryTable, rows: Rows) -> Turn:
    return Turn(rotary.cos, rotary.sin, rotary.is_interleaved, rows.positions)
