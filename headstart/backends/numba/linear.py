"""Products of `models/linear.py` by the compiled kernels: int8, and float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from headstart.backends.numba import float_products, products
from headstart.backends.numba.thread_pool import POOL, new_counters
from headstart.backends.weights import Int8Linear
from headstart.models.linear import Linear

_LARGEST = 127


class PackedLinear(Int8Linear):
    """y = x W^T + b with W packed; `scales` fp32, `bias` zeros where there is none."""

    bias: torch.Tensor

    def __init__(self, source: Linear | None = None):
        super().__init__()
        if source is None:
            return
        values = source.weight.detach().float()
        scales = (values.abs().amax(dim=1) / _LARGEST).clamp(min=1e-12)
        integers = (values / scales[:, None]).round().clamp(-_LARGEST, _LARGEST)
        bias = torch.zeros_like(scales) if source.bias is None else source.bias.detach().float()
        self._hold(integers.to(torch.int8), scales, bias)

    def _hold(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.levels = products.most_levels(weight)
        self.register_buffer("weight", products.pack(weight))
        self.register_buffer("scales", scales.contiguous())
        self.register_buffer("bias", bias.contiguous())

    def repack(self, packed: torch.Tensor) -> None:
        """The same weights at another place in memory."""
        self.weight = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().float().contiguous()
        y = torch.empty(len(rows), self.outputs)
        weight, scales, bias = self.weight.numpy(), self.scales.numpy(), self.bias.numpy()
        POOL.run(
            weight.size * len(rows), products.linear, new_counters(1), rows.numpy(), self.levels,
            weight, scales, bias, y.numpy(),
        )  # fmt: skip
        return y.to(x.dtype)

    def only_rows(self, ids: torch.Tensor) -> PackedLinear:
        """The same product for some outputs only."""
        result = PackedLinear()
        weight = products.unpack(self.weight, self.outputs, self.inputs)
        result._hold(weight[ids], self.scales[ids], self.bias[ids])
        return result


class PackedFloat(Linear):
    """y = x W^T + b in float32 with W packed; `bias` zeros where there is none."""

    def __init__(self, source: Linear | None = None):
        super().__init__(0, 0)
        if source is None:
            return
        weight = source.weight.detach()
        self._pack(weight, None if source.bias is None else source.bias.detach())

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.outputs = len(weight)
        self.repack(float_products.pack(weight))
        zeros = torch.zeros(self.outputs)
        self.bias = nn.Parameter(zeros if bias is None else bias.clone(), requires_grad=False)

    def repack(self, packed: torch.Tensor) -> None:
        """The same weights at another place in memory."""
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().contiguous()
        y = torch.empty(len(rows), self.outputs)
        weight = self.weight.numpy()
        POOL.run(
            weight.size * len(rows), float_products.linear, new_counters(1), rows.numpy(), weight,
            self.offsets, y.numpy(),
        )  # fmt: skip
        return y

    @property
    def offsets(self) -> np.ndarray:
        assert self.bias is not None
        return self.bias.numpy()

    def only_rows(self, ids: torch.Tensor) -> PackedFloat:
        """The same product for some outputs only."""
        result = PackedFloat()
        assert self.bias is not None
        result._pack(float_products.unpack(self.weight, self.outputs)[ids], self.bias[ids])
        return result
