"""Modules whose weights stay as they are stored: 8-bit floats, or integers in groups.

`Fp8Linear` and `GroupLinear` are `Linear`s, `Fp8Stack` and `GroupStack` the `Stack`s of experts.
Their tensors have the names, types and shapes of `checkpoint/quantized/weights.py`. Here they are
dequantised a few rows at a time while they compute: slow, correct, and little more memory than the
files. Kernels of backends read the same tensors and are held to this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch.nn.functional import linear

from headstart.checkpoint.quantized.weights import (
    FP8_BLOCK,
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
    fp8_rows,
)
from headstart.models.linear import PRODUCTS, Linear, Numbered, Stack

# Dequantised at a time, in a whole number of blocks: 64 MiB in fp32.
_VALUES = 1 << 24


class _Held(nn.Module):
    """What linears and stacks share: tensors that change their device, never their type."""

    dtype: torch.dtype  # that the model computes in

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(fn(tensor.new_empty(0)).device)

        nn.Module._apply(self, moved, recurse)
        return self

    def _hold(self, weight: QuantizedWeight) -> None:
        for name, value in weight.tensors.items():
            if name == "weight":
                self.weight = nn.Parameter(weight.weight, requires_grad=False)
            else:
                self.register_buffer(name, value)

    @property
    def quantized(self) -> QuantizedWeight:
        """The tensors that are held."""
        raise NotImplementedError

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W, as a copy in `dtype`, columns as published."""
        return self.quantized.dequantized(dtype)


class QuantizedLinear(_Held, Linear):
    """y = x W^T + b with a quantised W."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):  # fmt: skip
        super().__init__(0, 0)
        self.dtype = dtype
        self._hold(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [linear(x, part.dequantized(x.dtype)) for part in _pieces(self.quantized)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if self.bias is None else y + self.bias

    @property
    def matrix(self) -> torch.Tensor:
        """W in the type that the model computes in, as a copy."""
        return self.dequantized(self.dtype)

    def only_rows(self, ids: torch.Tensor) -> Linear:
        """The same product for some outputs only; of a matrix in blocks a plain one."""
        weight = self.quantized
        if weight.form == "fp8-block":
            result = Linear(0, 0)
            values = weight.dequantized(self.dtype)[ids]
            result.weight = nn.Parameter(values, requires_grad=False)
            return result
        return type(self)(_chosen(weight, ids), dtype=self.dtype)


class Fp8Linear(QuantizedLinear):
    """`weight` float8_e4m3fn [N, K]; `scales` fp32 [N], or [ceil(N/128), ceil(K/128)]."""

    scales: torch.Tensor

    @classmethod
    def of(cls, source: Linear) -> Self:
        """A plain matrix rounded, with one scale per output row."""
        values, bias = source.weight.detach(), source.bias
        return cls(fp8_rows(values), None if bias is None else bias.detach(), values.dtype)

    @property
    def quantized(self) -> Fp8Weight:
        return Fp8Weight(self.weight.data, self.scales)


class GroupLinear(QuantizedLinear):
    """`weight` uint8 [N, K * bits / 8]; `scales` and `zeros` [N, K/g]; `inputs` int32 [K]."""

    scales: torch.Tensor
    zeros: torch.Tensor | None
    inputs: torch.Tensor | None

    def __init__(
        self, weight: GroupWeight, bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):  # fmt: skip
        super().__init__(weight, bias, dtype)
        self.bits = weight.bits

    @property
    def quantized(self) -> GroupWeight:
        return GroupWeight(self.bits, self.weight.data, self.scales, self.zeros, self.inputs)


class QuantizedStack(_Held, Stack):
    """Matrices of one shape, each for rows of its own, [count, N, K], quantised."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16):
        super().__init__(0, 0, 0)
        self.dtype = dtype
        self._hold(weight)

    def product(self) -> Numbered:
        weight, form = self.quantized, PRODUCTS["single" if self.one_by_one else "rows"]
        return lambda x, number: form(x, weight.matrix(number).dequantized(x.dtype))


class Fp8Stack(QuantizedStack):
    """`weight` [E, N, K]; `scales` [E, N], or [E, ceil(N/128), ceil(K/128)]."""

    scales: torch.Tensor

    @property
    def quantized(self) -> Fp8Weight:
        return Fp8Weight(self.weight.data, self.scales)


class GroupStack(QuantizedStack):
    """`weight` [E, N, K * bits / 8]; `scales` and `zeros` [E, N, K/g]; `inputs` is None."""

    scales: torch.Tensor
    zeros: torch.Tensor | None
    inputs: torch.Tensor | None

    def __init__(self, weight: GroupWeight, dtype: torch.dtype = torch.bfloat16):
        super().__init__(weight, dtype)
        self.bits = weight.bits

    @property
    def quantized(self) -> GroupWeight:
        return GroupWeight(self.bits, self.weight.data, self.scales, self.zeros, self.inputs)


def quantized_module(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedLinear | QuantizedStack:
    """The module that holds a quantised matrix, or a stack of them."""
    if len(weight.shape) == 2:
        return linear_of(weight, bias, dtype)
    return Fp8Stack(weight, dtype) if isinstance(weight, Fp8Weight) else GroupStack(weight, dtype)


def linear_of(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> Fp8Linear | GroupLinear:
    """The module that holds one quantised matrix."""
    if isinstance(weight, Fp8Weight):
        return Fp8Linear(weight, bias, dtype)
    return GroupLinear(weight, bias, dtype)


def _pieces(weight: QuantizedWeight) -> list[QuantizedWeight]:
    """So many rows each that little memory is taken at a time."""
    count, columns = weight.shape
    step = max(FP8_BLOCK, _VALUES // columns // FP8_BLOCK * FP8_BLOCK)
    return [weight.rows(at, min(at + step, count)) for at in range(0, max(count, 1), step)]


def _chosen(weight: QuantizedWeight, ids: torch.Tensor) -> QuantizedWeight:
    if isinstance(weight, Fp8Weight):
        # Gathered as bytes: indexing is not made for every type on every device.
        rows = weight.weight.view(torch.uint8)[ids].view(weight.weight.dtype)
        return Fp8Weight(rows, weight.scales[ids])
    zeros = None if weight.zeros is None else weight.zeros[ids]
    return GroupWeight(weight.bits, weight.weight[ids], weight.scales[ids], zeros, weight.inputs)
