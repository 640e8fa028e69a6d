"""A matrix of 8-bit floats with one scale per output row: half the bytes of bf16 to read.

Rounding happens once, at load; activations keep their type, and products are computed in it. On a
GPU the kernels convert weights on their way to the arithmetic units. The plain path here copies the
whole matrix first: a reference, and what measures the quality where there is no GPU.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from headstart.models.linear import Linear

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
_ROWS = 4096  # converted at a time: an LM head in fp32 would not fit beside its model


class Fp8Linear(Linear):
    """y = x W^T + b, where W is `weight` [N, K] in fp8 times `scales` [N] in fp32."""

    scales: torch.Tensor

    def __init__(self, source: Linear | None = None):
        super().__init__(0, 0)
        if source is None:
            return
        values, bias = source.weight.detach(), source.bias
        stored = torch.empty_like(values, dtype=FORMAT)
        scales = torch.empty(len(values), device=values.device)
        for start in range(0, len(values), _ROWS):
            rows = slice(start, start + _ROWS)
            part = values[rows].float()
            # A row of zeros has no scale of its own.
            scales[rows] = (part.abs().amax(dim=1) / LARGEST).clamp(min=1e-12)
            stored[rows] = (part / scales[rows, None]).clamp(-LARGEST, LARGEST).to(FORMAT)
        self._hold(stored, scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def _hold(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return linear(x, self.dequantized(x.dtype), self.bias)
        from headstart.backends.cuda.kernels.fp8 import fp8_linear

        y = fp8_linear(x.contiguous(), self.weight, self.scales)
        return y if self.bias is None else y + self.bias

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W, as a copy in `dtype`."""
        return (self.weight.float() * self.scales[:, None]).to(dtype)

    def only_rows(self, ids: torch.Tensor) -> Fp8Linear:
        """The same product for some outputs only."""
        result = Fp8Linear()
        # Gathered as bytes: indexing is not made for every type on every device.
        chosen = self.weight.view(torch.uint8)[ids].view(FORMAT)
        result._hold(chosen, self.scales[ids].contiguous())
        return result
