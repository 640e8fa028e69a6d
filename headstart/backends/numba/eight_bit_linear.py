"""Products of `models/linear.py` by the compiled kernels whose weights are 8 bits as stored."""

from __future__ import annotations

import torch

from headstart.backends.numba import eight_bit_products
from headstart.backends.numba.linear import Packed, PackedFloat, bias_of, blank_float
from headstart.checkpoint.quantized.weights import Fp8Weight, GroupWeight
from headstart.models.linear import Linear
from headstart.models.quantized import QuantizedLinear, linear_of


class PackedEightBits(Packed, Linear):
    """8-bit floats with scales of rows or blocks, or 8-bit integers in groups."""

    layout: torch.Tensor  # the detail: where a head is swapped, it is written with the weights
    format = eight_bit_products.eight_bit_product

    def __init__(self, source: QuantizedLinear):
        super().__init__(0, 0)
        weight = source.quantized
        self.shape = (weight.shape[0], weight.shape[1])
        packed, self.factors, detail = eight_bit_products.pack(weight)
        self.repack(packed)
        self.register_buffer("layout", torch.tensor(detail))
        self.order = weight.inputs if isinstance(weight, GroupWeight) else None
        self.offsets = bias_of(source, self.shape[0])

    @property
    def detail(self) -> int:
        return int(self.layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiplied(x)

    def _chosen(self, ids: torch.Tensor) -> Fp8Weight | GroupWeight | torch.Tensor:
        """Some outputs; of floats with scales of blocks their values."""
        codes, scales, zeros = eight_bit_products.unpack_rows(
            self.weight, ids, self.shape[1], self.detail
        )
        assert self.factors is not None
        scales = scales * self.factors[ids, None]
        if not eight_bit_products.is_of_floats(self.detail):
            return GroupWeight(8, codes, scales, zeros, self.order)
        floats = codes.view(torch.float8_e4m3fn)
        if scales.shape[1] == 1:
            return Fp8Weight(floats, scales[:, 0])
        of_inputs = scales.repeat_interleave(eight_bit_products.group_of(self.detail), dim=1)
        return floats.float() * of_inputs[:, : self.shape[1]]

    def blank_rows(self, count: int) -> PackedFloat:
        return blank_float(count, self.shape[1])

    def float_row(self, output: int) -> torch.Tensor:
        chosen = self._chosen(torch.tensor([output]))
        if not isinstance(chosen, torch.Tensor):
            chosen = chosen.dequantized(torch.float32)
        return chosen[0]

    def only_rows(self, ids: torch.Tensor) -> PackedEightBits | PackedFloat:
        """The same product for some outputs only."""
        chosen, bias = self._chosen(ids), self.offsets[ids]
        if isinstance(chosen, torch.Tensor):
            return PackedFloat.of_values(chosen, bias)
        return PackedEightBits(linear_of(chosen, bias, torch.float32))
