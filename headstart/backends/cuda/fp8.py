"""8-bit floats with one scale per output row on a GPU: half the bytes of bf16 to read.

Activations keep their type, and products are computed in it: the kernels convert weights on their
way to the arithmetic units. Where there is no GPU the plain product of `models/quantized.py` runs.
"""

from __future__ import annotations

import torch

from headstart.models.quantized import Fp8Linear


class KernelFp8Linear(Fp8Linear):
    """`Fp8Linear` with one scale per row, by the kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super().forward(x)
        from headstart.backends.cuda.kernels.fp8 import fp8_linear

        y = fp8_linear(x.contiguous(), self.weight, self.scales)
        return y if self.bias is None else y + self.bias
