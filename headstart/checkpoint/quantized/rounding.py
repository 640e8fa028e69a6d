"""Rounding of a matrix to 4 bits in groups, with a search for the scale of each group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles

if TYPE_CHECKING:
    import torch

INT4_GROUP = 32
_LOWEST, _HIGHEST = -8, 7
# What the number farthest from zero may become. None cuts it: scales that do have the smaller
# squared error, and changed a model's predictions more.
_EXTREMES = (-8.0, 7.0, -7.5, -7.0)
_SCALE_BITS = 11  # as float16 has: kernels keep scales so
_VALUES = 1 << 20  # rounded at a time: they stay in a processor's cache


def int4_groups(values: torch.Tensor, group: int = INT4_GROUP) -> GroupWeight:
    """A matrix [N, K] in groups of its inputs, symmetric: zero is code 8."""
    import torch

    outputs, inputs = values.shape
    scales = torch.empty(outputs, inputs // group)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    step = max(1, _VALUES // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        part = values[rows].float().view(-1, group)
        found = _scales(part)
        whole = (part * _inverse(found)).round_().clamp_(_LOWEST, _HIGHEST).sub_(_LOWEST)
        scales[rows] = found.view(-1, inputs // group)
        codes[rows] = whole.to(torch.uint8).view(-1, inputs)
    return GroupWeight(4, pack_nibbles(codes), scales)


def _scales(groups: torch.Tensor) -> torch.Tensor:
    """Of the scales that are tried, that of the smallest squared error."""
    import torch

    extreme = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    least, result = torch.full_like(extreme, torch.inf), torch.zeros_like(extreme)
    for target in _EXTREMES:
        mantissa, exponent = torch.frexp(extreme / target)
        scales = torch.ldexp((mantissa * 2**_SCALE_BITS).round() / 2**_SCALE_BITS, exponent)
        codes = (groups * _inverse(scales)).round_().clamp_(_LOWEST, _HIGHEST)
        error = codes.mul_(scales).sub_(groups).square_().sum(dim=1, keepdim=True)
        result = torch.where(error < least, scales, result)
        least = torch.minimum(least, error)
    return result


def _inverse(values: torch.Tensor) -> torch.Tensor:
    """1 / x, and 0 of 0."""
    import torch

    return torch.where(values == 0, 0.0, 1 / values)
