"""Matrix products with weights as they were loaded; `backends/weights.py` has other formats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

MAX_TUNED_ROWS = 8


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


# Ways to compute x W^T. `backends/torch/tuning.py` takes the fastest of the first two,
# `backends/torch/exact.py` the first that gives a row the same bits at every place.
PRODUCTS = {"rows": _by_rows, "columns": _by_columns, "single": _by_single_rows}


class Linear(nn.Module):
    """y = x W^T + b, without initialisation: weights are always loaded."""

    bias: nn.Parameter | None
    int8: Linear | None  # the same in 8 bits, for what drafts

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.int8 = None
        self.plan: tuple[
            str, ...
        ] = ()  # by number of rows, from 1; set by backends/torch/tuning.py

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not 0 < rows <= len(self.plan) or self.plan[rows - 1] == "rows":
            return linear(x, self.weight, self.bias)
        result = PRODUCTS[self.plan[rows - 1]](x, self.weight)
        return result if self.bias is None else result + self.bias

    @property
    def matrix(self) -> torch.Tensor:
        """W in the type that the model computes in."""
        return self.weight

    def only_rows(self, ids: torch.Tensor) -> Linear:
        """The same product for some outputs only."""
        result = Linear(0, 0)
        result.weight = nn.Parameter(self.weight[ids].contiguous(), requires_grad=False)
        result.plan = self.plan
        return result


Numbered = Callable[[torch.Tensor, int], torch.Tensor]  # rows through the matrix of a number


class Stack(nn.Module):
    """Matrices of one shape, [count, outputs, inputs], each for rows of its own."""

    def __init__(self, count: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs), requires_grad=False)
        self.one_by_one = False  # set by backends/torch/exact.py
        self.plan: tuple[
            str, ...
        ] = ()  # by number of rows, from 1; set by backends/torch/tuning.py

    def product(self) -> Numbered:
        """x W[number]^T, to be asked for once per pass: gradients are then gathered once, too."""
        matrices = self.weight.unbind()
        return lambda x, number: self._form(x.shape[0])(x, matrices[number])

    def _form(self, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if self.one_by_one:
            return _by_single_rows
        return PRODUCTS[self.plan[rows - 1]] if 0 < rows <= len(self.plan) else _by_rows
