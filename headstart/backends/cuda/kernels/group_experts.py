"""Experts whose matrices are packed in groups of 4- or 8-bit integers, as kernels get them.

E routed experts, H model width, W width of an expert, V that of the shared ones, K inputs and N
outputs of a matrix, G inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.backends.cuda.kernels.group_packing import PackedGroups


@dataclass(frozen=True)
class GroupExperts:
    """gate_up [E, 2 W, H] and down [E, H, W], packed, scales and zeros [E, K / G, N]; the shared
    ones [2 V, H] and [H, V], packed in the same way, or None."""

    gate_up: PackedGroups
    down: PackedGroups
    shared_gate_up: PackedGroups | None = None
    shared_down: PackedGroups | None = None

    @property
    def count(self) -> int:
        return self.down.weight.shape[0]

    @property
    def width(self) -> int:
        return _inputs(self.down)

    @property
    def shared_width(self) -> int:
        return 0 if self.shared_down is None else _inputs(self.shared_down)

    @property
    def num_shared(self) -> int:
        """Experts that the shared MLP counts as; the last one may be narrower."""
        return -(-self.shared_width // self.width)

    @property
    def expert_bytes(self) -> int:
        parts = (part for packed in (self.gate_up, self.down) for part in _tensors(packed))
        return sum(part.nbytes for part in parts if part is not None) // self.count


def _inputs(packed: PackedGroups) -> int:
    return packed.weight.shape[-1] * 8 // packed.bits


def _tensors(packed: PackedGroups) -> tuple[Tensor, Tensor, Tensor | None]:
    return packed.weight, packed.scales, packed.zeros


def operands(
    own: PackedGroups, shared: PackedGroups | None, words: torch.dtype = torch.int8
) -> tuple[Tensor | None, ...]:
    """Weights as `words`, scales and zeros of a product, the shared ones after."""
    parts = (*_tensors(own), *(_tensors(shared) if shared else (None,) * 3))
    return tuple(
        part.view(words) if place % 3 == 0 and part is not None else part
        for place, part in enumerate(parts)
    )
