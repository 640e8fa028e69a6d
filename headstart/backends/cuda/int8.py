"""Int8 rows with one scale each beside the weights themselves, for what drafts.

Reading half the bytes pays while reading takes the time; many rows, such as a prompt's, go through
the weights as they are. `linear.Int8Linear` is what a CPU computes with.
"""

from __future__ import annotations

import torch
from torch import nn

from headstart.models.beside_rounds import is_beside, pause, rows_of_piece
from headstart.models.feed_forward import MoE
from headstart.models.linear import Linear

_LARGEST = 127
_ROWS = 4096  # converted at a time: an LM head in fp32 would not fit beside its model


class Int8Rows(Linear):
    """W as `weight` [N, K] int8 times `scales` [N] fp32; only kernels compute with it."""

    scales: torch.Tensor

    def __init__(self, source: Linear):
        super().__init__(0, 0)
        values = source.weight.detach()
        stored = torch.empty_like(values, dtype=torch.int8)
        scales = torch.empty(len(values), device=values.device)
        size = rows_of_piece(values) if is_beside() else _ROWS
        for start in range(0, len(values), size):
            rows = slice(start, start + size)
            part = values[rows].float()
            scales[rows] = (part.abs().amax(dim=1) / _LARGEST).clamp(min=1e-12)
            stored[rows] = (part / scales[rows, None]).round().clamp(-_LARGEST, _LARGEST).char()
            pause(values.device)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.scales = scales


def with_int8(layer: Linear) -> Linear:
    """The same layer, sharing its weights, with an 8-bit copy for few rows."""
    result = Linear(0, 0)
    result.weight, result.bias = layer.weight, layer.bias
    result.int8 = Int8Rows(layer)
    return result


def add_int8(module: nn.Module) -> None:
    """Give every plain matrix below `module` an 8-bit copy, where it has none; not experts, which
    are read whole."""
    for layer in _copied(module):
        if layer.int8 is None:
            layer.int8 = Int8Rows(layer)


def int8_bytes(module: nn.Module) -> int:
    """What the copies of `add_int8` take."""
    return sum(layer.weight.numel() + 4 * len(layer.weight) for layer in _copied(module))


def _copied(module: nn.Module) -> list[Linear]:
    modules = list(module.modules())
    among = {layer for moe in modules if isinstance(moe, MoE) for layer in moe.modules()}
    return [each for each in modules if type(each) is Linear and each not in among]
