"""Recurrent layers in rounds: the states of requests, and how a round's rows go on from them.

A request's memory lies in its slot, behind by the rows of its last round; what these rows brought
lies in its rings (`kernels/delta.py`). `settle` brings a slot up to date for a request that leaves
the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.backends.cuda.forward import Kernels, Recur
from headstart.backends.cuda.kernels.delta import (
    DeltaRequests,
    Rings,
    convolve_round,
    delta_round,
    empty_rings,
)
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates


@dataclass(frozen=True)
class RecurrentBatch:
    """What S requests have in every recurrent layer; all layers share slots and buffers."""

    replays: Tensor  # [S] rows of the last round that a memory is behind
    slots: Tensor  # [S] of the memories
    buffers: Tensor  # [S] a permutation: a request that changes its index keeps its rings
    rings: list[Rings]  # by layer

    @classmethod
    def create(
        cls, config: DeltaConfig, layers: int, count: int, max_drafts: int, dtype: torch.dtype,
        device: torch.device,
    ) -> RecurrentBatch:  # fmt: skip
        """Rings for rounds of up to `max_drafts` drafts; on the meta device nothing is taken."""
        # Rows of two rounds, or what the convolution still has to see of the one before.
        rows = max_drafts + 1
        places = rows + max(rows, config.kernel - 1)
        numbers = [torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2)]
        rings = [
            empty_rings(count, places, config.channels, config.v_heads, dtype, device)
            for _ in range(layers)
        ]
        buffers = torch.arange(count, dtype=torch.int32, device=device)
        return cls(numbers[0], numbers[1], buffers, rings)

    @property
    def num_bytes(self) -> int:
        tensors = [t for ring in self.rings for t in (ring.inputs, ring.mixed, ring.gates)]
        return sum(t.nbytes for t in (self.replays, self.slots, self.buffers, *tensors))

    def admit(
        self, at: int, slot: int, buffer: int, num_rows: int, states: list[LayerStates]
    ) -> None:
        """A request whose `num_rows` rows so far made the states in `slot`."""
        self.replays[at].fill_(0)
        self.slots[at].fill_(slot)
        for ring, own in zip(self.rings, states, strict=True):
            for back, row in enumerate(own.conv[slot].flip(0), 1):
                if num_rows >= back:
                    ring.inputs[buffer, (num_rows - back) % ring.inputs.shape[1]] = row

    def move(self, source: int, target: int, buffers: list[int]) -> None:
        """A request changes its index; `buffers` are those of all requests from now on."""
        for tensor in (self.replays, self.slots):
            tensor[target] = tensor[source]
        for at in (source, target):
            self.buffers[at].fill_(buffers[at])

    def at(self, first: Tensor) -> DeltaRequests:
        """Those whose first row has position `first` [B], -1 for none."""
        count = first.shape[0]
        return DeltaRequests(first, self.replays[:count], self.slots[:count], self.buffers[:count])


def round_recur(
    kernels: Kernels, batch: RecurrentBatch, states: list[LayerStates], first: Tensor, rows: int
) -> Recur:
    """How `rows` new rows of each request go on."""
    own = batch.at(first)

    def recur(net: DeltaNet, layer: int, x: Tensor) -> Tensor:
        partial, rings = kernels.product(x, net.inputs), batch.rings[layer]
        convolve_round(partial, net.conv.squeeze(1), net.a_log, net.dt_bias, own, rings, rows)
        read = delta_round(
            partial, net.norm, net.eps, states[layer].memory, own, rings, rows,
            is_silu=net.config.gate == "silu",
        )  # fmt: skip
        return kernels.product(read, net.out)

    return recur


def repeat(net: DeltaNet, state: LayerStates, own: DeltaRequests, rings: Rings) -> None:
    """Memories that are behind by the rows of a round are brought up to date."""
    nothing = state.memory.new_zeros(1, len(own.first), 1)
    delta_round(nothing, net.norm, net.eps, state.memory, own, rings, 0)


def settle(
    nets: Sequence[DeltaNet], batch: RecurrentBatch, states: list[LayerStates], lengths: list[int],
    repeats: Callable[[DeltaNet, LayerStates, DeltaRequests, Rings], None] = repeat,
) -> None:  # fmt: skip
    """Bring the slots of the first requests up to date; lengths: their tokens, newest included."""
    device = batch.slots.device
    first = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=device)
    own, count = batch.at(first), len(lengths)
    slots, buffers = own.slots.tolist(), own.buffers.tolist()
    for net, rings, state in zip(nets, batch.rings, states, strict=True):
        repeats(net, state, own, rings)
        kept, places = state.conv.shape[1], rings.inputs.shape[1]
        for length, slot, buffer in zip(lengths, slots, buffers, strict=True):
            positions = torch.arange(length - 1 - kept, length - 1, device=device)
            rows = rings.inputs[buffer, positions % places]
            state.conv[slot] = rows.masked_fill((positions < 0)[:, None], 0)
    batch.replays[:count] = 0
