"""Which way to compute small matrix products, measured on this machine.

For a handful of rows libraries differ by a factor of two and more between computing x W^T and
(W x^T)^T, and one row may cost more than two. The choice is measured once per shape and number of
rows, over several weights of the model itself, so that caches do not flatter either. Two starts
may choose differently, and with them the last bits of a result (`models/exact.py` does not).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from headstart.models.linear import MAX_TUNED_ROWS, PRODUCTS, Linear

_WEIGHTS = 6  # how many weights of a shape take part
_REPEATS = 3
_CANDIDATES = ("rows", "columns")


def tune(*modules: nn.Module) -> dict[tuple[int, int], tuple[str, ...]]:
    """Set the product of every fp32 CPU Linear; returns the choices by shape, from one row up."""
    groups: dict[tuple[int, int], list[Linear]] = defaultdict(list)
    for module in modules:
        for child in module.modules():
            weight = child.weight if isinstance(child, Linear) else None
            if weight is not None and weight.dtype == torch.float32 and weight.device.type == "cpu":
                groups[tuple(weight.shape)].append(child)  # type: ignore[index, arg-type]
    chosen = {}
    with torch.inference_mode():
        for shape, linears in groups.items():
            plan = tuple(_fastest(linears, rows) for rows in range(1, MAX_TUNED_ROWS + 1))
            for linear in linears:
                linear.plan = plan
            chosen[shape] = plan
    return chosen


def _fastest(linears: list[Linear], rows: int) -> str:
    x = torch.randn(rows, linears[0].weight.shape[1])
    weights = [linear.weight for linear in linears[:_WEIGHTS]]
    times = {name: _seconds(PRODUCTS[name], x, weights) for name in _CANDIDATES}
    return min(times, key=lambda name: times[name])


def _seconds(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: list[nn.Parameter],
) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for weight in weights:
            product(x, weight)
        best = min(best, time.perf_counter() - started)
    return best
