"""Recurrent layers over rows of prompts, and of anything else that is ragged.

The rows of all requests go through a layer in two or three launches, however many there are. What
these need to know of the requests goes to the device once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.backends.cuda.forward import Kernels, Recur
from headstart.backends.cuda.kernels.delta_chunks import (
    ROWS,
    ChunkTile,
    DeltaWeights,
    prepare_chunks,
)
from headstart.backends.cuda.kernels.delta_prompts import Walks, WalkTile, walk
from headstart.backends.rows import on_device
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, first_rows

_NARROW, _WIDE = 32, 64  # values of a head that a program takes along
_PROGRAMS = 132  # that a GPU runs at once
_DIMS = (32, 48, 64, 80, 96, 112, 128)  # of heads, that kernels take


@dataclass(frozen=True)
class PromptTiles:
    chunks: ChunkTile
    walk: WalkTile


def tiles_for(num_spans: int, config: DeltaConfig) -> PromptTiles:
    """One request has few programs that walk, so that heads are split in more parts."""
    values = _WIDE if num_spans >= many_requests(config) else _NARROW
    return PromptTiles(ChunkTile(), WalkTile(values=values))


def why_plain(config: DeltaConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps the kernels from reading prompts of a model, or None; interpreted ones take all.

    On an H200 they were right for heads of 32 x 32, 48 x 80 and 128 x 128, wrong for 16 x 12.
    """
    if device.type != "cuda":
        return None
    if dtype != torch.bfloat16:
        return f"numbers are {str(dtype).removeprefix('torch.')}, kernels are made for bfloat16"
    if config.k_dim not in _DIMS or config.v_dim not in _DIMS:
        return f"heads have sizes of {config.k_dim} and {config.v_dim}"
    return None


def many_requests(config: DeltaConfig) -> int:
    """From so many on there are more narrow programs than run at once."""
    return _PROGRAMS // -(-config.values // _NARROW) + 1


@dataclass(frozen=True)
class PromptRows:
    """The rows of a pass, cut into chunks that end where a state is kept."""

    chunks: Tensor  # [N, 4], see `prepare_chunks`
    walks: Walks

    @classmethod
    def of(cls, spans: Sequence[StateSpan], device: torch.device) -> PromptRows:
        chunks, pieces, keeps, begins = list[int](), list[int](), list[int](), list[int]()
        for span in sorted(spans, key=lambda span: span.start - span.stop):  # longest walks first
            source = -1 if span.source is None else span.source
            begin = len(pieces) // 4
            for rows, slots in span.pieces():
                for first in range(rows.start, rows.stop, ROWS):
                    count = min(ROWS, rows.stop - first)
                    chunks += [first, count, first - span.start, source]
                pieces += [rows.start, rows.stop, len(keeps), len(keeps) + len(slots)]
                keeps += slots
            begins += [begin, len(pieces) // 4, source, span.start]
        sizes = [len(part) for part in (chunks, begins, pieces, keeps)]
        numbers = on_device([*chunks, *begins, *pieces, *keeps], device, torch.int32)
        of_chunks, of_spans, of_pieces, slots_kept = numbers.split(sizes)
        walks = Walks(of_spans.view(-1, 4), of_pieces.view(-1, 4), slots_kept)
        return cls(of_chunks.view(-1, 4), walks)

    def run(
        self, net: DeltaNet, projected: Tensor, states: LayerStates, tiles: PromptTiles
    ) -> Tensor:
        """projected [T, ...], what the layer's first product gave -> what its last one reads."""
        config, conv = net.config, net.conv.squeeze(1)
        weights = DeltaWeights(conv, net.a_log, net.dt_bias)
        made = prepare_chunks(projected, weights, states.conv, self.chunks, config, tiles.chunks)
        return walk(made, projected, net.norm, net.eps, states, self.walks, config, tiles.walk)


def prompt_recur(kernels: Kernels, states: list[LayerStates], spans: Sequence[StateSpan]) -> Recur:
    """How rows go on that are `spans`, one after another without gaps."""
    rows = PromptRows.of(spans, states[0].memory.device)

    def recur(net: DeltaNet, layer: int, x: Tensor) -> Tensor:
        partial = kernels.product(x, net.inputs)
        projected = partial[0] if len(partial) == 1 else partial.sum(0)
        tiles = tiles_for(len(spans), net.config)
        return kernels.product(rows.run(net, projected, states[layer], tiles), net.out)

    return recur


def plain_recur(states: list[LayerStates], spans: Sequence[StateSpan]) -> Recur:
    """The same as the plain modules do it."""
    numbers = first_rows(spans)
    starts = on_device(numbers, states[0].memory.device) if numbers else None

    def recur(net: DeltaNet, layer: int, x: Tensor) -> Tensor:
        result: Tensor = net(x, None, SlotRecurrence(states[layer], spans, starts=starts))
        return result.unsqueeze(0)

    return recur
