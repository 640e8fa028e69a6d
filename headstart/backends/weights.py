"""Weight formats of CPUs that torch computes: int8, 4 bits; and how a module gets another format.

`Int8Linear` holds int8 rows with one scale each and computes with bf16 activations, the way that
CPUs without bf16 units are fast at; the arithmetic of a row may then depend on how many rows there
are, as in bf16 on a GPU. `backends/numba/linear.py` has a faster form, `models/quantized.py`
the formats in which checkpoints are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.functional import pad

from headstart.backends.options import Weights
from headstart.checkpoint.quantized.rounding import INT4_GROUP, int4_groups
from headstart.checkpoint.quantized.weights import FORMS
from headstart.models.linear import Linear, Numbered, Stack
from headstart.models.quantized import GroupLinear, QuantizedLinear, QuantizedStack, linear_of
from headstart.models.trunk import Trunk

WeightFormat = Callable[[Linear], nn.Module]
# THE tables which quantised forms of checkpoints a backend computes with as they are stored, among
# experts and elsewhere; others are dequantised when a model is loaded.
TAKEN_FORMS: dict[str, tuple[str, ...]] = {
    "cuda": FORMS,
    "numba": FORMS,
    "torch": FORMS,
}
TAKEN_EXPERTS: dict[str, tuple[str, ...]] = {
    "cuda": FORMS,
    "numba": FORMS,
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


def plain_int8(source: Linear) -> nn.Module:
    """int8 by torch; what is quantised already stays as it is."""
    return source if isinstance(source, QuantizedLinear) else Int8Linear(source)


def plain_int4(source: Linear) -> nn.Module:
    """4 bits in groups, dequantised for every product; int8 for no whole number of groups."""
    if isinstance(source, QuantizedLinear):
        return source
    if source.weight.shape[1] % INT4_GROUP:
        return Int8Linear(source)
    return int4_linear(source)


def int4_linear(source: Linear, group: int = INT4_GROUP) -> GroupLinear:
    """A plain matrix rounded."""
    bias = None if source.bias is None else source.bias.detach()
    return GroupLinear(int4_groups(source.weight.detach(), group), bias, source.weight.dtype)


def _as_it_is(source: Linear) -> nn.Module:
    return source


PLAIN_FORMS: dict[str, WeightFormat] = {
    "as-dtype": _as_it_is,
    "int8": plain_int8,
    "int4": plain_int4,
}


class SplitStack(nn.Module):
    """Matrices of one shape, each in a format of its own."""

    def __init__(self, source: Stack, form: WeightFormat):
        super().__init__()
        self.parts = nn.ModuleList(form(matrix) for matrix in _matrices(source))

    def product(self) -> Numbered:
        return lambda x, number: self.parts[number](x)


def _matrices(source: Stack) -> Iterator[Linear]:
    if isinstance(source, QuantizedStack):
        for number in range(source.quantized.shape[0]):
            yield linear_of(source.quantized.matrix(number), None, source.dtype)
        return
    for matrix in source.weight.unbind():
        alone = Linear(0, 0)
        alone.weight = nn.Parameter(matrix, requires_grad=False)
        yield alone


def convert_trunk(trunk: Trunk, forms: Mapping[str, WeightFormat], weights: Weights) -> None:
    """Give a trunk's matrices the format that `weights` asks for."""
    for name, child in trunk.named_children():
        if isinstance(child, Linear):
            setattr(trunk, name, forms[beside_layers(weights)](child))
        else:
            convert_weights(child, forms[weights])


def beside_layers(weights: Weights) -> Weights:
    """What LM head and head have where layers are to have `weights`.

    With 4 bits they stay in 8: they are a small part of what is read, the LM head alone would
    change as much as all layers, and a coarser head is right less often.
    """
    return "int8" if weights == "int4" else weights


def convert_weights(module: nn.Module, form: WeightFormat) -> nn.Module:
    """Replace every Linear below `module` by the same in another format; returns the module."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, form(child))
        elif isinstance(child, Stack):
            setattr(module, name, SplitStack(child, form))
        else:
            convert_weights(child, form)
    return module
