"""Rounding of a matrix so that its products change little for the inputs that it really gets.

After GPTQ: columns are rounded one after another, and what a column loses is made up for by those
that are not rounded yet, as far as their inputs go together. `moments` is the sum of x x^T over
inputs x. Scales are fixed before: per output row for 8 bits, per group of a row for 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from headstart.checkpoint.quantized.weights import (
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
    pack_nibbles,
)

Bits = Literal["4", "8", "fp8"]
_LOWEST, _HIGHEST, _LARGEST_INT8 = -8, 7, 127
# Steps from zero to the number of a group that is farthest from it; beyond the range it is cut
# off. Scales are positive, as other writers of the format make them.
_EXTREMES = (7.0, 7.5, 8.0, 8.5)
_DAMPING = 0.01  # of the mean of the diagonal: inputs that were never seen stay as they are
_COLUMNS = 64  # whose losses are made up for together
_VALUES = 1 << 26  # rounded at a time: rows do not depend on each other
Nearest = Callable[[Tensor], Tensor]  # scaled values to the nearest that the format has


def rounded(values: Tensor, bits: Bits, group: int, moments: Tensor | None) -> QuantizedWeight:
    """values [N, K] in the form that `bits` names; without moments to nearest."""
    spread = None if moments is None else _Spread.of(moments)
    importance = None if moments is None or spread is None else _importance(moments)
    step = max(1, _VALUES // values.shape[1])
    parts = [
        _rounded(values[at : at + step].float(), bits, group, spread, importance)
        for at in range(0, len(values), step)
    ]
    codes = torch.cat([codes for codes, _ in parts])
    scales = torch.cat([scales for _, scales in parts])
    if bits == "fp8":
        return Fp8Weight(codes.to(torch.float8_e4m3fn), scales.squeeze(1))
    if bits == "8":
        return GroupWeight(8, (codes + 128).to(torch.uint8), scales)
    return GroupWeight(4, pack_nibbles((codes - _LOWEST).to(torch.uint8)), scales.bfloat16())


def _rounded(
    values: Tensor, bits: Bits, group: int, spread: _Spread | None, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes as fp32 [N, K], and scales [N, K/g]."""
    if bits == "4":
        scales, nearest = _group_scales(values, group, importance), _nearest_int4
    else:
        largest = _LARGEST_INT8 if bits == "8" else torch.finfo(torch.float8_e4m3fn).max
        scales = (values.abs().amax(dim=1, keepdim=True) / largest).clamp(min=1e-12)
        nearest = _nearest_int8 if bits == "8" else _nearest_fp8
    wide = scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1)
    if spread is None:
        return nearest(values / wide), scales
    return spread.rounded(values, wide, nearest), scales


def _nearest_int4(scaled: Tensor) -> Tensor:
    return scaled.round().clamp(_LOWEST, _HIGHEST)


def _nearest_int8(scaled: Tensor) -> Tensor:
    return scaled.round().clamp(-_LARGEST_INT8, _LARGEST_INT8)


def _nearest_fp8(scaled: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).float()


def _importance(moments: Tensor) -> Tensor:
    diagonal = moments.diagonal().float()
    return diagonal + _DAMPING * diagonal.mean()


def _group_scales(values: Tensor, group: int, importance: Tensor | None) -> Tensor:
    """[N, K/g]: of the scales that are tried, that whose error weighs least."""
    parts = values.view(len(values), -1, group)
    weight = 1.0 if importance is None else importance.view(-1, group)
    extreme = parts.abs().amax(dim=2, keepdim=True)
    least, result = torch.full_like(extreme, torch.inf), torch.ones_like(extreme)
    for target in _EXTREMES:
        scales = (extreme / target).bfloat16().float()  # as they are stored
        scales = torch.where(scales == 0, 1.0, scales)
        error = _nearest_int4(parts / scales) * scales - parts
        error = (error.square_() * weight).sum(dim=2, keepdim=True)
        result = torch.where(error < least, scales, result)
        least = torch.minimum(least, error)
    return result.squeeze(2)


class _Spread:
    """How the loss of one column is spread over those that are rounded after it."""

    def __init__(self, order: Tensor, factors: Tensor):
        self.order = order  # columns, those with the largest inputs first
        self.factors = factors  # upper triangular [K, K]

    @classmethod
    def of(cls, moments: Tensor) -> _Spread | None:
        """None where no input was ever seen."""
        diagonal = moments.diagonal()
        mean = float(diagonal.mean())
        if mean == 0:
            return None
        order = diagonal.argsort(descending=True)
        sorted_ = moments[order][:, order].double()
        sorted_.diagonal().add_(_DAMPING * mean)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(sorted_))
        return cls(order, torch.linalg.cholesky(inverse, upper=True).float())

    def rounded(self, values: Tensor, scales: Tensor, nearest: Nearest) -> Tensor:
        # By column: each one then lies in one piece of memory.
        left, wide = (x.T[self.order].contiguous() for x in (values, scales))
        codes, factors = torch.empty_like(left), self.factors
        for start in range(0, len(left), _COLUMNS):
            stop = min(start + _COLUMNS, len(left))
            losses = torch.empty_like(left[start:stop])
            for at in range(start, stop):
                codes[at] = nearest(left[at] / wide[at])
                losses[at - start] = (left[at] - codes[at] * wide[at]) / factors[at, at]
                left[at + 1 : stop].addr_(factors[at, at + 1 : stop], losses[at - start], alpha=-1)
            left[stop:].addmm_(factors[start:stop, stop:].T, losses, alpha=-1)
        result = torch.empty_like(values)
        result[:, self.order] = codes.T
        return result
