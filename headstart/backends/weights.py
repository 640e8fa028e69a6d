"""Weight formats that are no plain `Linear`: int8 by torch, and how a module gets another format.

`Int8Linear` holds int8 rows with one scale each and computes with bf16 activations, the way that
CPUs without bf16 units are fast at; the arithmetic of a row may then depend on how many rows there
are, as in bf16 on a GPU. `backends/numba/linear.py` has a faster form, `models/quantized.py`
the formats in which checkpoints are stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import pad

from headstart.checkpoint.quantized.weights import FORMS
from headstart.models.linear import Linear, Numbered, Stack

WeightFormat = Callable[[Linear], nn.Module]
# THE table which quantised forms of checkpoints a backend computes with as they are stored; others
# are dequantised when a model is loaded.
TAKEN_FORMS: dict[str, tuple[str, ...]] = {
    "cuda": (),
    "numba": (),
    "torch": FORMS,
}
_INT8_COLUMNS = 16  # torch's int8 product is wrong, or crashes, for widths that are no multiple


class Int8Linear(nn.Module):
    """The same with weights of 8 bits; rounding is symmetric, one scale per output row."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, source: Linear | None = None):
        super().__init__()
        if source is None:
            return
        values = source.weight.detach().float()
        scales = (values.abs().amax(dim=1) / 127).clamp(min=1e-12)
        # The kernel wants scales in bf16; rounding them first makes the integers fit what it uses.
        scales = scales.bfloat16()
        integers = (values / scales.float()[:, None]).round().clamp(-127, 127)
        missing = -integers.shape[1] % _INT8_COLUMNS
        self.register_buffer("weight", pad(integers.to(torch.int8), (0, missing)))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if source.bias is None else source.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.weight.shape[1] - x.shape[-1]
        rows = pad(x.bfloat16(), (0, missing)) if missing else x.bfloat16()
        y = torch._weight_int8pack_mm(rows, self.weight, self.scales).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def only_rows(self, ids: torch.Tensor) -> Int8Linear:
        """The same product for some outputs only."""
        result = Int8Linear()
        result.register_buffer("weight", self.weight[ids].contiguous())
        result.register_buffer("scales", self.scales[ids].contiguous())
        result.register_buffer("bias", None)
        return result


class QuantizedStack(nn.Module):
    """The same with each matrix in a quantised form of its own."""

    def __init__(self, source: Stack, form: WeightFormat):
        super().__init__()
        self.parts = nn.ModuleList(form(_alone(matrix)) for matrix in source.weight.unbind())

    def product(self) -> Numbered:
        return lambda x, number: self.parts[number](x)


def _alone(matrix: torch.Tensor) -> Linear:
    result = Linear(0, 0)
    result.weight = nn.Parameter(matrix, requires_grad=False)
    return result


def convert_weights(module: nn.Module, form: WeightFormat) -> nn.Module:
    """Replace every Linear below `module` by the same in another format; returns the module."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, form(child))
        elif isinstance(child, Stack):
            setattr(module, name, QuantizedStack(child, form))
        else:
            convert_weights(child, form)
    return module
