"""A quantised matrix in memory, in one of the two forms that the engine computes with.

Every stored format that runs as stored becomes one of them when it is read: zero points, packing
orders and offsets are resolved then. A leading dimension stands for stacked experts.

- `Fp8Weight`: `weight` float8_e4m3fn [N, K]; `scales` fp32, [N] or [ceil(N/128), ceil(K/128)];
  W[n, k] = q * s.
- `GroupWeight`: `weight` uint8 [N, K], or [N, K/2] in 4 bits; `scales` and `zeros` [N, K/g];
  W[n, k] = (q - z) * s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from headstart.checkpoint.values import to_float32

if TYPE_CHECKING:
    import torch

FP8_BLOCK = 128
FORMS = ("fp8-row", "fp8-block", "int4-group", "int8-group")
_ROWS = 4096  # converted at a time: an LM head in fp32 would not fit beside its model


@dataclass(frozen=True)
class Fp8Weight:
    """8-bit floats (e4m3) with one scale per output row or per 128 x 128 block."""

    weight: torch.Tensor  # [..., N, K]
    scales: torch.Tensor  # fp32, [..., N] or [..., ceil(N/128), ceil(K/128)]

    @property
    def form(self) -> str:
        return "fp8-block" if self.scales.dim() == self.weight.dim() else "fp8-row"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, [..., N, K]."""
        return tuple(self.weight.shape)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "scales": self.scales}

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W as a copy; the product of fp32 numbers is rounded once."""
        scales = self.scales
        if self.form == "fp8-row":
            return (_floats(self.weight) * scales.unsqueeze(-1)).to(dtype)
        rows, columns = self.shape[-2:]
        scales = scales.repeat_interleave(FP8_BLOCK, dim=-1)[..., :columns]
        scales = scales.repeat_interleave(FP8_BLOCK, dim=-2)[..., :rows, :]
        return (_floats(self.weight) * scales).to(dtype)

    def rows(self, start: int, stop: int) -> Self:
        """Some outputs; with blocks `start` is a multiple of 128."""
        weight = self.weight[..., start:stop, :]
        if self.form == "fp8-row":
            return replace(self, weight=weight, scales=self.scales[..., start:stop])
        assert start % FP8_BLOCK == 0, "a block of scales is not cut"
        blocks = slice(start // FP8_BLOCK, -(-stop // FP8_BLOCK))
        return replace(self, weight=weight, scales=self.scales[..., blocks, :])

    def matrix(self, number: int) -> Self:
        """One expert's of a stack."""
        return replace(self, weight=self.weight[number], scales=self.scales[number])


@dataclass(frozen=True)
class GroupWeight:
    """Integers of 4 or 8 bits in groups along K, one scale (and zero point) per row and group.

    Of two 4-bit codes in a byte the even element is in the low half. Codes are unsigned; without
    `zeros` the zero point is 2^(bits - 1). `inputs` says which input comes where, for columns that
    were sorted by group; None where they are in order.
    """

    bits: int
    weight: torch.Tensor  # uint8 [..., N, K * bits / 8]
    scales: torch.Tensor  # [..., N, K / g], in the type in which they are stored
    zeros: torch.Tensor | None = None  # uint8 [..., N, K / g]
    inputs: torch.Tensor | None = None  # int32 [K]

    @property
    def form(self) -> str:
        return f"int{self.bits}-group"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, [..., N, K]."""
        *leading, columns = self.weight.shape
        return (*leading, columns * 8 // self.bits)

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {
            "weight": self.weight, "scales": self.scales, "zeros": self.zeros,
            "inputs": self.inputs,
        }  # fmt: skip

    def codes(self) -> torch.Tensor:
        """Unsigned codes, uint8 [..., N, K], in the order in which they are held."""
        import torch

        if self.bits == 8:
            return self.weight
        return torch.stack([self.weight & 15, self.weight >> 4], dim=-1).flatten(-2)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W as a copy, columns as published.

        A code minus its zero point times a scale of 16 bits is exact in fp32, and rounded once.
        """
        import torch

        *leading, groups = self.scales.shape
        values = self.codes().to(torch.float32).view(*leading, groups, -1)
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.float().unsqueeze(-1)
        values = (values - zeros) * self.scales.float().unsqueeze(-1)
        result = values.flatten(-2).to(dtype)
        if self.inputs is None:
            return result
        places = torch.empty_like(self.inputs, dtype=torch.long)
        places[self.inputs.long()] = torch.arange(len(places), device=places.device)
        return result[..., places]

    def rows(self, start: int, stop: int) -> Self:
        """Some outputs."""
        zeros = None if self.zeros is None else self.zeros[..., start:stop, :]
        weight, scales = self.weight[..., start:stop, :], self.scales[..., start:stop, :]
        return replace(self, weight=weight, scales=scales, zeros=zeros)

    def matrix(self, number: int) -> Self:
        """One expert's of a stack."""
        zeros = None if self.zeros is None else self.zeros[number]
        return replace(self, weight=self.weight[number], scales=self.scales[number], zeros=zeros)


QuantizedWeight = Fp8Weight | GroupWeight


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return to_float32(weight) if weight.device.type == "cpu" else weight.float()


def fp8_rows(values: torch.Tensor) -> Fp8Weight:
    """A matrix [..., N, K] rounded to 8-bit floats with one scale per row."""
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    flat = values.reshape(-1, values.shape[-1])
    weight = torch.empty_like(flat, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(flat), device=values.device)
    for start in range(0, len(flat), _ROWS):
        rows = slice(start, start + _ROWS)
        part = flat[rows].float()
        # A row of zeros has no scale of its own.
        scales[rows] = (part.abs().amax(dim=1) / largest).clamp(min=1e-12)
        scaled = (part / scales[rows, None]).clamp(-largest, largest)
        weight[rows] = scaled.to(torch.float8_e4m3fn)
    return Fp8Weight(weight.view(values.shape), scales.view(values.shape[:-1]))


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15, uint8 [..., K], two in a byte: the even element in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
