"""Matrix products in the formats that weights come in.

`Linear` holds what was loaded. `Int8Linear` holds int8 rows with one scale each and computes
with bf16 activations, the path that CPUs without bf16 units are fast at; the arithmetic of a row
may then depend on how many rows there are, as in bf16 on a GPU. `cpu/linear.py` has a faster form
of it, `models/fp8.py` the 8-bit floats of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear, pad

MAX_TUNED_ROWS = 8
_INT8_COLUMNS = 16  # torch's int8 product is wrong, or crashes, for widths that are no multiple


def _by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight)


def _by_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(W x^T)^T; one row is computed as two, which libraries do faster.

    Rows lie one after another in what comes in and goes out: what follows would be slower with
    columns, and the next product by far.
    """
    if x.shape[0] == 1:
        return torch.mm(weight, torch.cat([x, x]).t())[:, :1].t().contiguous()
    return torch.mm(weight, x.contiguous().t()).t().contiguous()


def _by_single_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every row by itself, from a copy: slow, and the same bits wherever the row stands."""
    return torch.cat([linear(row.clone()[None], weight) for row in x])


# Ways to compute x W^T. `models/tuning.py` takes the fastest of the first two; `models/exact.py`
# the first that gives a row the same bits at every place.
PRODUCTS = {"rows": _by_rows, "columns": _by_columns, "single": _by_single_rows}


class Linear(nn.Module):
    """y = x W^T + b, without initialisation: weights are always loaded."""

    bias: nn.Parameter | None
    scales: torch.Tensor | None  # one per output where `weight` is quantised
    int8: Linear | None  # the same in 8 bits, for what drafts

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.register_buffer("scales", None)
        self.int8 = None
        self.plan: tuple[str, ...] = ()  # by number of rows, from 1; set by tuning

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not 0 < rows <= len(self.plan) or self.plan[rows - 1] == "rows":
            return linear(x, self.weight, self.bias)
        result = PRODUCTS[self.plan[rows - 1]](x, self.weight)
        return result if self.bias is None else result + self.bias

    def only_rows(self, ids: torch.Tensor) -> Linear:
        """The same product for some outputs only."""
        result = Linear(0, 0)
        result.weight = nn.Parameter(self.weight[ids].contiguous(), requires_grad=False)
        result.plan = self.plan
        return result


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


Numbered = Callable[[torch.Tensor, int], torch.Tensor]  # rows through the matrix of a number


class Stack(nn.Module):
    """Matrices of one shape, [count, outputs, inputs], each for rows of its own."""

    def __init__(self, count: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs), requires_grad=False)
        self.one_by_one = False  # set by models/exact.py
        self.plan: tuple[str, ...] = ()  # by number of rows, from 1; set by tuning

    def product(self) -> Numbered:
        """x W[number]^T, to be asked for once per pass: gradients are then gathered once, too."""
        matrices = self.weight.unbind()
        return lambda x, number: self._form(x.shape[0])(x, matrices[number])

    def _form(self, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if self.one_by_one:
            return _by_single_rows
        return PRODUCTS[self.plan[rows - 1]] if 0 < rows <= len(self.plan) else _by_rows


class QuantizedStack(nn.Module):
    """The same with each matrix in a quantised form of its own."""

    def __init__(self, source: Stack, form: Callable[[Linear], nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(form(_alone(matrix)) for matrix in source.weight.unbind())

    def product(self) -> Numbered:
        return lambda x, number: self.parts[number](x)


def _alone(matrix: torch.Tensor) -> Linear:
    result = Linear(0, 0)
    result.weight = nn.Parameter(matrix, requires_grad=False)
    return result


def quantize(module: nn.Module, form: Callable[[Linear], nn.Module]) -> nn.Module:
    """Replace every Linear below `module` by its quantised form; returns the module."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, form(child))
        elif isinstance(child, Stack):
            setattr(module, name, QuantizedStack(child, form))
        else:
            quantize(child, form)
    return module
