"""Matrices in 8-bit floats and in groups of integers, as kernels compute with them.

`KernelLinear` is a weight format with kernels of its own: which kernel, or which library, computes
a product of how many rows is decided here, per format. What comes in is rounded once per product:
rows to 8-bit floats for `KernelFp8`, to pairs of integers for `KernelGroups`; norms before 8-bit
floats are rounded by the kernel that makes them.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headstart.backends.cuda import fp8_library
from headstart.backends.cuda.kernels.choice import choose_logits
from headstart.backends.cuda.kernels.eight_bits import (
    GROUP,
    Fp8Rows,
    IntegerRows,
    fp8_rows,
    integer_rows,
    silu_fp8,
    silu_integers,
)
from headstart.backends.cuda.kernels.fp8_products import (
    MAX_FUSED_ROWS,
    TILE_ROWS,
    choose_fp8,
    cut_for,
    gated_fp8,
    partial_fp8,
)
from headstart.backends.cuda.kernels.groups import (
    MAX_ROWS,
    PackedGroups,
    choose_groups,
    dequantized_groups,
    half_for,
    packed_groups,
    partial_groups,
    shape_for,
)
from headstart.backends.cuda.kernels.rows import add_norm, add_norm_fp8, silu_product
from headstart.backends.cuda.kernels.wide_groups import (
    PartedRows,
    parted_rows,
    parted_silu,
    partial_wide,
    takes_wide,
    wide_shape,
)
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Linear, GroupLinear

MAX_FP8_ROWS = TILE_ROWS[-1]  # of own tiles, where a library would do
_COPIED_VALUES = 1 << 27  # of W at a time: memory for the copy, not for an LM head's

Rounded = Fp8Rows | IntegerRows | PartedRows  # rows as kernels of a format read them


class KernelLinear(Linear):
    """x W^T by kernels of a weight format; a bias is left to what adds partial sums up."""

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):  # a pass over the middle of a prompt wants no logits
            return x.new_empty(0, self.weight.shape[0])
        y = self.whole(x)
        return y if self.bias is None else y + self.bias

    def partial(self, x: Tensor | Rounded) -> Tensor:
        """[S, M, N], whose sum over S is x W^T."""
        raise NotImplementedError

    def whole(self, x: Tensor) -> Tensor:
        """x W^T [M, N] in x's type."""
        raise NotImplementedError

    def gated(self, x: Tensor | Rounded) -> Tensor:
        """silu(x G^T) * (x U^T) [M, N / 2] in the model's type; W holds G's rows, then U's."""
        assert isinstance(x, Tensor)
        return silu_product(self.whole(x))

    def gated_for(self, x: Tensor | Rounded, down: KernelLinear) -> Tensor | Rounded:
        """The same as `down` takes it, rounded already where kernels do that on the way."""
        return self.gated(x)

    def choose(
        self, x: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Token ids [M] that this LM head and the noise choose."""
        return choose_logits(self.whole(x), inv_temps, seeds, positions, token_ids)


class KernelFp8(KernelLinear, Fp8Linear):
    """8-bit floats on both sides, with scales of rows, or of 128 x 128 and of 128 inputs."""

    def partial(self, x: Tensor | Rounded) -> Tensor:
        rows = self._rounded(x)
        if rows.shape[0] > MAX_FP8_ROWS:
            return self._product(rows).unsqueeze(0)
        return partial_fp8(rows, self.weight, self.scales)

    def whole(self, x: Tensor) -> Tensor:
        return self._product(self._rounded(x)).to(x.dtype)

    def gated(self, x: Tensor | Rounded) -> Tensor:
        rows = self._rounded(x)
        if rows.shape[0] > MAX_FUSED_ROWS[self._is_blocked]:
            return silu_product(self._product(rows))
        return gated_fp8(rows, self.weight, self.scales, dtype=self.dtype)

    def gated_for(self, x: Tensor | Rounded, down: KernelLinear) -> Tensor | Rounded:
        if not isinstance(down, KernelFp8):
            return self.gated(x)
        rows = self._rounded(x)
        if rows.shape[0] > MAX_FUSED_ROWS[self._is_blocked]:
            return silu_fp8(self._product(rows).unsqueeze(0), down.group)
        # The scale of a row needs all its outputs, which no single program of the product has.
        return down._rounded(self.gated(rows))

    def choose(
        self, x: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if len(x) > MAX_FP8_ROWS:
            return super().choose(x, inv_temps, seeds, positions, token_ids)
        return choose_fp8(
            self._rounded(x), self.weight, self.scales, inv_temps, seeds, positions, token_ids
        )

    @property
    def _is_blocked(self) -> bool:
        return self.scales.dim() == 2

    @property
    def group(self) -> int:
        """Inputs of a row that share a scale; 0: all."""
        return GROUP if self._is_blocked else 0

    def _rounded(self, x: Tensor | Rounded) -> Fp8Rows:
        if isinstance(x, Tensor):
            return fp8_rows(x.contiguous(), self.group)
        assert isinstance(x, Fp8Rows) and x.group == self.group
        return x

    def _product(self, rows: Fp8Rows) -> Tensor:
        """x W^T [M, N] in the type that the model computes in."""
        weight, many = self.weight, MAX_FUSED_ROWS[self._is_blocked]
        if rows.shape[0] > many and fp8_library.takes(rows, weight, self.scales, self.dtype):
            return fp8_library.library_fp8(rows, weight, self._library_scales, self.dtype)
        shape, streams = cut_for(weight, rows.shape[0], is_blocked=self._is_blocked)
        shape = replace(shape, splits=1)
        found = partial_fp8(rows, weight, self.scales, shape, streams=streams, dtype=self.dtype)
        return found[0]

    def prepare(self) -> None:
        """Make what a captured pass must find: nothing may be tried or kept while capturing."""
        if (
            self._is_blocked
            and self.weight.is_cuda
            and fp8_library.takes_blocks(self.weight.device)
        ):
            _ = self._library_scales

    @cached_property
    def _library_scales(self) -> Tensor:
        return fp8_library.library_scales(self.scales)


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
                shape = replace(wide_shape(outputs, inputs, len(x)), splits=1)
                return partial_wide(rows, packed, shape)[0].to(x.dtype)
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
        return rows > MAX_ROWS and not takes_wide(self.packed, rows, self.dtype)

    def _gathered(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else x[:, self.inputs]

    def _rounded(self, x: Tensor) -> IntegerRows | PartedRows:
        rows, packed = self._gathered(x).contiguous(), self.packed
        if takes_wide(packed, len(x), x.dtype):
            return parted_rows(rows, packed.half)
        return integer_rows(rows, packed.half)


def add_norm_for(
    layer: Linear | None, stream: Tensor, partial: Tensor, weight: Tensor, eps: float
) -> Tensor | Fp8Rows:
    """`add_norm`, rounded by the same kernel where only `layer` reads it and takes it so."""
    if isinstance(layer, KernelFp8):
        return add_norm_fp8(stream, partial, weight, eps, layer.group)
    return add_norm(stream, partial, weight, eps)


def copied_rows(inputs: int) -> int:
    """Outputs of a matrix that are dequantised at a time."""
    return max(1, _COPIED_VALUES // inputs)


def copied_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Of the largest copy that many rows are multiplied by."""
    shapes = [own.packed.shape for own in module.modules() if isinstance(own, KernelGroups)]
    values = (min(outputs, copied_rows(inputs)) * inputs for outputs, inputs in shapes)
    return max(values, default=0) * dtype.itemsize


def hold_for_kernels(module: nn.Module) -> list[str]:
    """Give every quantised matrix below `module` the form of its kernels; notes about others."""
    small, kinds = 0, (Fp8Linear, GroupLinear)
    # By name, so that each original is freed when it is replaced: integers are packed anew.
    for path in [name for name, layer in module.named_modules() if isinstance(layer, kinds)]:
        layer = module.get_submodule(path)
        made: Linear | None = None
        if isinstance(layer, Fp8Linear) and not isinstance(layer, KernelFp8):
            bias = None if layer.bias is None else layer.bias.detach()
            made = KernelFp8(layer.quantized, bias, layer.dtype)
            made.prepare()
        elif isinstance(layer, GroupLinear):
            made = KernelGroups.of(layer)
            if made is None:
                made, small = _plain(layer), small + 1
        if made is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made)
    if not small:
        return []
    return [f"{small} matrices are dequantised: kernels want groups of a multiple of 32 inputs"]


def _plain(layer: GroupLinear) -> Linear:
    result = Linear(0, 0)
    result.weight = nn.Parameter(layer.matrix, requires_grad=False)
    result.bias = layer.bias
    return result


def round_to_fp8(module: nn.Module) -> None:
    """Round every plain matrix below `module` but LM heads, with one scale per output row.

    Rounding an LM head changes the text as much as rounding all layers does. The gate of shared
    experts is one row, which the choice of experts reads as it is.
    """
    for name, child in module.named_children():
        if type(child) is not Linear:
            round_to_fp8(child)
        elif name not in ("lm_head", "shared_gate"):
            setattr(module, name, KernelFp8.of(child))
