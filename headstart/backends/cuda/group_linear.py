"""Matrices of integers in groups: which kernel computes a product of how many rows.

A few rows are rounded to pairs of integers, more of them are laid out for products of floats, and
for many a copy of the matrix in their type goes to a library.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headstart.backends.cuda.kernel_linear import KernelLinear, Rounded
from headstart.backends.cuda.kernels.eight_bits import IntegerRows, integer_rows, silu_integers
from headstart.backends.cuda.kernels.group_packing import (
    PackedGroups,
    dequantized_groups,
    half_for,
    packed_groups,
)
from headstart.backends.cuda.kernels.groups import (
    MAX_ROWS,
    choose_groups,
    partial_groups,
    shape_for,
)
from headstart.backends.cuda.kernels.wide_groups import (
    MOST_WIDE,
    PartedRows,
    parted_rows,
    parted_silu,
    partial_wide,
    takes_wide,
    wide_cut,
)
from headstart.models.quantized import GroupLinear

_COPIED_VALUES = 1 << 27  # of W at a time: memory for the copy, not for an LM head's


class KernelGroups(KernelLinear):
    """Integers of 4 or 8 bits in groups, repacked; with many rows a copy in x's type is used."""

    scales: Tensor
    zeros: Tensor | None
    inputs: Tensor | None

    def __init__(
        self, packed: PackedGroups, inputs: Tensor | None, bias: nn.Parameter | None,
        dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__(0, 0)
        self.dtype = dtype
        self.weight = nn.Parameter(packed.weight, requires_grad=False)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("zeros", packed.zeros)
        self.register_buffer("inputs", inputs)
        self.bias = bias
        self._sizes = packed.bits, packed.group, packed.half

    @classmethod
    def of(cls, source: GroupLinear) -> KernelGroups | None:
        """The same matrix; None where its groups are too small for the kernels."""
        weight = source.quantized
        if half_for(weight.shape[1], weight.group_size, weight.bits) is None:
            return None
        packed = packed_groups(weight.weight, weight.scales, weight.zeros, weight.bits)
        return cls(packed, weight.inputs, source.bias, source.dtype)

    @property
    def packed(self) -> PackedGroups:
        return PackedGroups(self.weight.data, self.scales, self.zeros, *self._sizes)

    def only_rows(self, ids: Tensor) -> KernelGroups:
        return type(self)(self.packed.rows(ids), self.inputs, None, self.dtype)

    @property
    def matrix(self) -> Tensor:
        """W in the type that the model computes in, as a copy, columns as published."""
        values = dequantized_groups(self.packed, self.dtype)
        if self.inputs is None:
            return values
        result = torch.empty_like(values)
        result[:, self.inputs] = values
        return result

    def partial(self, x: Tensor | Rounded) -> Tensor:
        if isinstance(x, Tensor):
            if self._is_copied(len(x)):
                return self.whole(x).unsqueeze(0)
            x = self._rounded(x)
        if isinstance(x, PartedRows):
            return partial_wide(x, self.packed)
        assert isinstance(x, IntegerRows)
        return partial_groups(x, self.packed)

    def whole(self, x: Tensor) -> Tensor:
        packed = self.packed
        outputs, inputs = packed.shape
        if not self._is_copied(len(x)):
            rows = self._rounded(x)
            if isinstance(rows, PartedRows):
                cut = replace(wide_cut(outputs, inputs, len(x)), splits=1)
                return partial_wide(rows, packed, cut)[0].to(x.dtype)
            shape = replace(shape_for(outputs, inputs, len(x)), splits=1)
            return partial_groups(rows, packed, shape)[0].to(x.dtype)
        x, each = self._gathered(x), copied_rows(inputs)
        if outputs <= each:
            return linear(x, dequantized_groups(packed, x.dtype))
        result = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
        for start in range(0, outputs, each):
            part = slice(start, min(start + each, outputs))
            copy = dequantized_groups(packed.rows(part), x.dtype)
            result[:, part] = linear(x, copy)
        return result

    def gated_for(self, x: Tensor | Rounded, down: KernelLinear) -> Tensor | Rounded:
        assert isinstance(x, Tensor)
        if not isinstance(down, KernelGroups) or down.inputs is not None:
            return self.gated(x)
        if self._is_copied(len(x)) or down._is_copied(len(x)):
            return self.gated(x)
        if takes_wide(down.packed, len(x), down.dtype):
            return parted_silu(self.partial(x), down.packed.half, down.dtype)
        return silu_integers(self.partial(x), down.packed.half)

    def choose(
        self, x: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if len(x) > MAX_ROWS:
            return super().choose(x, inv_temps, seeds, positions, token_ids)
        rows = integer_rows(self._gathered(x).contiguous(), self.packed.half)
        return choose_groups(rows, self.packed, inv_temps, seeds, positions, token_ids)

    def _is_copied(self, rows: int) -> bool:
        """Whether so many are multiplied by a copy in their type."""
        packed = self.packed
        if takes_wide(packed, MOST_WIDE, self.dtype):
            return rows > MOST_WIDE
        return rows > MAX_ROWS

    def _gathered(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else x[:, self.inputs]

    def _rounded(self, x: Tensor) -> IntegerRows | PartedRows:
        rows, packed = self._gathered(x).contiguous(), self.packed
        if takes_wide(packed, len(x), x.dtype):
            return parted_rows(rows, packed.half)
        return integer_rows(rows, packed.half)


def copied_rows(inputs: int) -> int:
    """Outputs of a matrix that are dequantised at a time."""
    return max(1, _COPIED_VALUES // inputs)


def copied_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Of the largest copy that many rows are multiplied by."""
    shapes = [own.packed.shape for own in module.modules() if isinstance(own, KernelGroups)]
    values = (min(outputs, copied_rows(inputs)) * inputs for outputs, inputs in shapes)
    return max(values, default=0) * dtype.itemsize
