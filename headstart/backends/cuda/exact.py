"""Kernels in which a row's result does not depend on how many rows there are, to the bit.

A kernel adds in an order that its cut decides, and a compiler may decide it anew for other sizes.
So nothing here is chosen by the number of rows: products have tiles of 16 rows and a cut by the
weight's shape; rows are filled up to whole tiles, so that every launch has the same parameters;
each row attends by itself, its context cut from slot 0 in pieces of one size; logits are always
written out, and every choice is made by `kernels/sampling.py`. What is left is that a
row's place in its tile must not matter: scripts/gpu_exact_check.py looks at all of them on a GPU.

Only the trunk is exact: what the head drafts decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.backends.cuda.attending import Attend, Sight
from headstart.backends.cuda.forward import Kernels, Rows
from headstart.backends.cuda.kernels.attention import paged_attention
from headstart.backends.cuda.kernels.attention_cuts import Cut
from headstart.backends.cuda.kernels.index_choice import Texts
from headstart.backends.cuda.kernels.latent import tile_lines
from headstart.backends.cuda.kernels.linear import Shape, gated_linear, partial_linear, splits_for
from headstart.backends.cuda.latent import LatentAttend, Queries, attend_latents, sees_at_most
from headstart.backends.cuda.sparse import Choices
from headstart.models.attention import LayerCache
from headstart.models.feed_forward import MLP, MoE
from headstart.models.linear import Linear
from headstart.models.trunk import Trunk

TILE = 16  # rows
_LOGITS = Shape(outputs=64, inputs=128, splits=1, warps=4, stages=3, rows=TILE)
_GATED = Shape(outputs=64, inputs=128, splits=1, warps=4, stages=3, rows=TILE)
_LEAST_CUT, _MOST_CUTS = 256, 32
_SLACK = 64  # slots after the last position that drafts without room may name
_MOST_VALUES = 2**31  # that a product counts


class ExactKernels(Kernels):
    """The same forward passes for a trunk of `max_positions`, whatever the engine's limits are."""

    heads_each = 2
    always_processes = True

    def __init__(self, max_positions: int):
        self._max_context = max_positions + _SLACK
        size = _LEAST_CUT
        while size * _MOST_CUTS < self._max_context:
            size *= 2
        self._cut = Cut(tokens=size, step=64, warps=4, stages=2)
        self._latent_cut = Cut(tokens=size, step=64, warps=8, stages=2)

    def product(self, x: Tensor, layer: Linear) -> Tensor:
        shape = exact_shape(*layer.weight.shape)
        parts = _countable(x, layer.weight, shape)
        return _joined([partial_linear(part, layer.weight, shape) for part in parts], 1)

    def whole(self, x: Tensor, layer: Linear) -> Tensor:
        """x W^T [M, N] in fp32: logits, the only ones that anything is chosen from."""
        parts = _countable(filled(x), layer.weight, _LOGITS)
        found = _joined([partial_linear(part, layer.weight, _LOGITS) for part in parts], 1)
        return found[0, : x.shape[0]]

    def gated(self, x: Tensor, layer: Linear) -> Tensor:
        parts = _countable(x, layer.weight, _GATED)
        return _joined([gated_linear(part, layer.weight, _GATED) for part in parts], 0)

    def feed(self, x: Tensor, mlp: MLP | MoE, kv_slots: Tensor) -> Tensor:
        """Experts get whole tiles of rows, one after another: they are read for each."""
        if not isinstance(mlp, MoE):
            return super().feed(x, mlp, kv_slots)
        parts = zip(_parts(filled(x), TILE), _parts(filled(kv_slots, -1), TILE), strict=True)
        terms = [super(ExactKernels, self).feed(part, mlp, own) for part, own in parts]
        return _joined(terms, 1)[:, : x.shape[0]]

    def logits(self, x: Tensor, lm_head: Linear) -> Tensor:
        return self.whole(x, lm_head).unsqueeze(0)

    def trunk(
        self, trunk: Trunk, ids: Tensor, rows: Rows, caches: list[LayerCache],
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """How rows attend is one of `by_row` and `latent_by_row`, which get filled up rows."""
        assert kept is None, "all rows go the same way"
        count = ids.shape[0]
        positions, kv_slots = filled(rows.positions), filled(rows.kv_slots, -1)
        whole = replace(rows, positions=positions, kv_slots=kv_slots)
        stream, normed = super().trunk(trunk, filled(ids), whole, caches)
        return stream[:count], normed[:count]

    def paged(
        self, tables: Tensor, seen: Tensor, rows: int, *, block_size: int, max_context: int,
        first_slot: int,
    ) -> Attend:  # fmt: skip
        if first_slot > 0:  # the head's
            return super().paged(
                tables, seen, rows, block_size=block_size, max_context=max_context,
                first_slot=first_slot,
            )  # fmt: skip
        return self.by_row(tables.repeat_interleave(rows, 0), _slots_of(seen, rows), block_size)

    def by_row(self, tables: Tensor, slots: Tensor, block_size: int) -> Attend:
        """Each row a request of its own: tables [M, blocks] int32, slots [M] int32, -1: none.

        The result takes q filled up to whole tiles.
        """
        all_tables, all_slots = _tiles_of(tables, slots)

        def attend(q: Tensor, cache: LayerCache, sight: Sight) -> Tensor:
            parts = [
                paged_attention(
                    part.unsqueeze(1), cache.k, cache.v, own, seen, block_size=block_size,
                    max_context=self._max_context, cut=self._cut, sizes=cache.sizes,
                    window=sight.window, sinks=sight.sinks,
                ).view(TILE, -1)
                for part, own, seen in zip(_parts(q, TILE), all_tables, all_slots, strict=True)
            ]  # fmt: skip
            return _joined(parts, 0)

        return attend

    def paged_latent(
        self, tables: Tensor, seen: Tensor, rows: int, *, block_size: int, max_context: int,
        first_slot: int,
    ) -> LatentAttend:  # fmt: skip
        if first_slot > 0:  # the head's
            return super().paged_latent(
                tables, seen, rows, block_size=block_size, max_context=max_context,
                first_slot=first_slot,
            )  # fmt: skip
        own = tables.repeat_interleave(rows, 0)
        return self.latent_by_row(own, _slots_of(seen, rows), block_size)

    def latent_by_row(self, tables: Tensor, slots: Tensor, block_size: int) -> LatentAttend:
        """`by_row` over latents, of which an indexer may choose some."""
        pairs = zip(*_tiles_of(tables, slots), strict=True)
        parts = [
            (Texts(own, seen, 1, block_size, self._max_context), Choices()) for own, seen in pairs
        ]

        def attend(queries: Queries, cache: LayerCache) -> Tensor:
            attention, top_k = queries.attention, sees_at_most(queries.attention)
            lines = tile_lines(attention.heads, cache.k.element_size())
            cut = replace(self._latent_cut, lines=lines)
            if cache.k.element_size() > 2:  # fewer numbers fit into shared memory
                cut = replace(cut, step=16, stages=1)
            results = []
            for number, (texts, choices) in enumerate(parts):
                at = torch.arange(number * TILE, (number + 1) * TILE, device=tables.device)
                own = queries.of(at)
                if top_k is not None and top_k < self._max_context:
                    texts = choices.of(own.index, cache.v, texts, top_k, TILE)
                results.append(attend_latents(own, cache, texts, cut))
            return _joined(results, 0)

        return attend


def _slots_of(seen: Tensor, rows: int) -> Tensor:
    """Of `rows` rows of each request, [B * R]; -1: none."""
    slots = seen[:, None] + torch.arange(rows, dtype=seen.dtype, device=seen.device)
    return slots.masked_fill(seen[:, None] < 0, -1).flatten()


def _tiles_of(tables: Tensor, slots: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Both in whole tiles of rows."""
    width = -tables.shape[1] % TILE  # a stride that is always a multiple compiles alike
    return _parts(filled(pad(tables, (0, width))), TILE), _parts(filled(slots, -1), TILE)


def exact_shape(outputs: int, inputs: int) -> Shape:
    """The cut of a product, by its weight alone: enough programs to fill a GPU twice."""
    splits = splits_for(outputs, inputs)
    return Shape(outputs=64, inputs=128, splits=splits, warps=4, stages=3, rows=TILE)


def _countable(x: Tensor, weight: Tensor, shape: Shape) -> list[Tensor]:
    """Rows in as few parts as a kernel that counts in 32 bits can take."""
    widest = max(shape.splits * weight.shape[0], weight.shape[1])
    return _parts(x, _MOST_VALUES // widest // TILE * TILE)


def _parts(rows: Tensor, each: int) -> list[Tensor]:
    return [rows[start : start + each] for start in range(0, max(1, rows.shape[0]), each)]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def filled(rows: Tensor, value: int = 0) -> Tensor:
    """Whole tiles: `value` in the rows that are missing."""
    missing = -rows.shape[0] % TILE
    return pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing), value=value) if missing else rows
