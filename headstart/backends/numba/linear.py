"""Products of `models/linear.py` by the compiled kernels: float32, int8, and 4 bits in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from headstart.backends.numba import calls, float_products, group_products, products
from headstart.backends.numba.sums import TILE
from headstart.backends.numba.thread_pool import POOL, new_counters
from headstart.backends.weights import Int8Linear
from headstart.checkpoint.quantized.weights import GroupWeight
from headstart.models.linear import Linear
from headstart.models.quantized import GroupLinear

_LARGEST = 127


class Packed(nn.Module):
    """y = x W^T + b with W packed for the kernels; `bias` zeros where there is none."""

    weight: nn.Parameter
    factors: torch.Tensor | None = None  # fp32, by output
    offsets: torch.Tensor  # the bias
    order: torch.Tensor | None = None  # int32, which input comes where
    format: ClassVar[calls.Product]
    shape: tuple[int, int]  # outputs, inputs
    _described: tuple[np.ndarray, ...] = ()  # rows of tables that say where it lies

    @property
    def detail(self) -> int:
        """What the format needs to know beside the sizes."""
        return 0

    def repack(self, packed: torch.Tensor) -> None:
        """The same weights at another place in memory."""
        self.weight = nn.Parameter(packed, requires_grad=False)

    def fields(self) -> list[int]:
        """As kernels read it (`calls.py`), for as long as this module holds its tensors."""
        fields = [0] * calls.FIELDS
        fields[calls.PRODUCT] = self.format.address
        fields[calls.WEIGHTS] = self.weight.data_ptr()
        fields[calls.SCALES] = 0 if self.factors is None else self.factors.data_ptr()
        fields[calls.BIAS] = self.offsets.data_ptr()
        fields[calls.ORDER] = 0 if self.order is None else self.order.data_ptr()
        fields[calls.OUTPUTS], fields[calls.WIDTH] = self.shape
        fields[calls.DETAIL] = self.detail
        return fields

    def describe(self, row: np.ndarray) -> None:
        """Write the fields into a row of a table that kernels read."""
        row[:] = self.fields()
        self._described = (*self._described, row)

    def weights_changed(self) -> None:
        """Other weights were written into the same memory: what tables say may be another."""
        for row in self._described:
            row[:] = self.fields()

    def blank_rows(self, count: int) -> Packed:
        """Room for `count` of its outputs, which `copy_rows` fills."""
        raise NotImplementedError

    def copy_rows(self, source: Packed, outputs: Sequence[int], places: Sequence[int]) -> None:
        """Make some of its outputs those of the matrix that `blank_rows` was asked of, or of
        another with such room."""
        raise NotImplementedError

    def float_row(self, output: int) -> torch.Tensor:
        """The weights of one output [K], where `blank_rows` have floats."""
        raise NotImplementedError

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().float().contiguous()
        y = torch.empty(len(rows), self.shape[0])
        POOL.run(
            self.shape[0] * self.shape[1] * len(rows), calls.apply_alone, new_counters(1),
            rows.numpy(), np.array([self.fields()]), y.numpy(), held=self,
        )  # fmt: skip
        return y.to(x.dtype)


class PackedLinear(Packed, Int8Linear):
    """int8 with one scale per output; `scales` fp32."""

    weight: nn.Parameter
    bias: torch.Tensor
    levels: torch.Tensor  # the largest integer that inputs may have
    format = products.int8_product

    @property
    def detail(self) -> int:
        return int(self.levels)

    def __init__(self, source: Linear | None = None):
        super().__init__()
        if source is None:
            return
        values = source.weight.detach().float()
        scales = (values.abs().amax(dim=1) / _LARGEST).clamp(min=1e-12)
        integers = (values / scales[:, None]).round().clamp(-_LARGEST, _LARGEST)
        self._hold(integers.to(torch.int8), scales, bias_of(source, len(values)))

    @classmethod
    def of_rows(cls, source: GroupLinear) -> PackedLinear:
        """8-bit integers as they are stored, with one scale per output."""
        weight, result = source.quantized, cls()
        integers = (weight.weight.to(torch.int16) - 128).to(torch.int8)
        result._hold(integers, weight.scales[:, 0].float(), bias_of(source, len(integers)))
        return result

    def _hold(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.repack(products.pack(weight))
        self.register_buffer("levels", torch.tensor(products.most_levels(weight)))
        self.register_buffer("scales", scales.contiguous())
        self.register_buffer("bias", bias.contiguous())
        self.factors, self.offsets = self.scales, self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiplied(x)

    def blank_rows(self, count: int) -> PackedLinear:
        result = PackedLinear()
        result._hold(
            torch.zeros(count, self.shape[1], dtype=torch.int8), torch.zeros(count),
            torch.zeros(count),
        )  # fmt: skip
        result.levels = self.levels.clone()
        return result

    def copy_rows(self, source: Packed, outputs: Sequence[int], places: Sequence[int]) -> None:
        assert isinstance(source, PackedLinear)
        new, old = products.by_output(self.weight), products.by_output(source.weight)
        for output, place in zip(outputs, places, strict=True):
            new[products.lane_of(place)] = old[products.lane_of(output)]
            self.scales[place], self.bias[place] = source.scales[output], source.bias[output]

    def only_rows(self, ids: torch.Tensor) -> PackedLinear:
        """The same product for some outputs only."""
        result = PackedLinear()
        weight = products.unpack_rows(self.weight, ids, self.shape[1])
        result._hold(weight, self.scales[ids], self.bias[ids])
        return result


class PackedFloat(Packed, Linear):
    """float32 as it is."""

    format = float_products.float_product

    def __init__(self, source: Linear | None = None):
        super().__init__(0, 0)
        if source is not None:
            self._pack(source.weight.detach(), bias_of(source, len(source.weight)))

    @classmethod
    def of_values(cls, weight: torch.Tensor, bias: torch.Tensor) -> PackedFloat:
        result = cls()
        result._pack(weight, bias)
        return result

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.repack(float_products.pack(weight))
        self.bias = nn.Parameter(bias.clone(), requires_grad=False)
        self.offsets = self.bias.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiplied(x)

    def blank_rows(self, count: int) -> PackedFloat:
        return blank_float(count, self.shape[1])

    def copy_rows(self, source: Packed, outputs: Sequence[int], places: Sequence[int]) -> None:
        new = float_products.by_output(self.weight)
        for output, place in zip(outputs, places, strict=True):
            new[float_products.lane_of(place)] = source.float_row(output)
            self.offsets[place] = source.offsets[output]

    def float_row(self, output: int) -> torch.Tensor:
        return float_products.by_output(self.weight)[float_products.lane_of(output)]

    def only_rows(self, ids: torch.Tensor) -> PackedFloat:
        """The same product for some outputs only."""
        values = float_products.unpack_rows(self.weight, ids)
        return PackedFloat.of_values(values, self.offsets[ids])


class PackedGroups(Packed, Linear):
    """4 bits in groups along the inputs, as stored."""

    format = group_products.group_product

    def __init__(self, source: GroupLinear):
        super().__init__(0, 0)
        weight, part = source.quantized, group_products.part_of(source.quantized.group_size)
        assert part is not None, "others are dequantised"
        self.shape = (weight.shape[0], weight.shape[1])
        self.group, self.part, self.has_zeros = weight.group_size, part, weight.zeros is not None
        packed, self.factors = group_products.pack(weight)
        self.repack(packed)
        self.order = weight.inputs
        self.offsets = bias_of(source, self.shape[0])

    @property
    def detail(self) -> int:
        points = group_products.points_bytes(self.shape[1] // self.group) if self.has_zeros else 0
        return group_products.detail_of(self.group, self.part, points)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiplied(x)

    def unpacked(self) -> GroupWeight:
        """What was packed, with scales in float32."""
        assert self.factors is not None
        weight = group_products.unpack(
            self.weight, self.factors, self.shape[1], self.group, has_zeros=self.has_zeros
        )
        return replace(weight, inputs=self.order)

    def blank_rows(self, count: int) -> PackedFloat:
        return blank_float(count, self.shape[1])

    def float_row(self, output: int) -> torch.Tensor:
        tile, place = divmod(output, TILE)
        assert self.factors is not None
        weight = group_products.unpack(
            self.weight[tile : tile + 1], self.factors[tile * TILE : (tile + 1) * TILE],
            self.shape[1], self.group, has_zeros=self.has_zeros,
        )  # fmt: skip
        whole = GroupLinear(replace(weight, inputs=self.order), dtype=torch.float32)
        return whole.dequantized(torch.float32)[place]

    def only_rows(self, ids: torch.Tensor) -> PackedGroups:
        """The same product for some outputs only."""
        whole = GroupLinear(self.unpacked(), dtype=torch.float32)
        chosen = whole.only_rows(ids)
        assert isinstance(chosen, GroupLinear)
        chosen.bias = nn.Parameter(self.offsets[ids], requires_grad=False)
        return PackedGroups(chosen)


def blank_float(outputs: int, inputs: int) -> PackedFloat:
    """Room for so many outputs."""
    return PackedFloat.of_values(torch.zeros(outputs, inputs), torch.zeros(outputs))


def bias_of(source: Linear, outputs: int) -> torch.Tensor:
    """Zeros where there is none."""
    return torch.zeros(outputs) if source.bias is None else source.bias.detach().float().clone()
