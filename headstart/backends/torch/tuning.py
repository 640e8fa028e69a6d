"""Which way to compute small matrix products, measured on this machine.

For a handful of rows libraries differ by a factor of two and more between computing x W^T and
(W x^T)^T, and one row may cost more than two. The choice is measured once per shape and number of
rows, over several weights of the model itself, so that caches do not flatter either. Two starts
may choose differently, and with them the last bits of a result (`backends/torch/exact.py` does
not).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection

import torch
from torch import nn

from headstart.models.linear import MAX_TUNED_ROWS, PRODUCTS, Linear, Stack

_WEIGHTS = 6  # how many weights of a shape take part
_REPEATS = 3
_CANDIDATES = ("rows", "columns")


def tune(
    *modules: nn.Module, measured: Collection[int] = range(1, MAX_TUNED_ROWS + 1)
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Set the product of all fp32 weights on a CPU; returns the choices by shape, from one row up.

    An expert's matrix counts as one of its shape. Numbers of rows that are not `measured` get the
    library's own way.
    """
    groups: dict[tuple[int, int], list[Linear | Stack]] = defaultdict(list)
    for module in modules:
        for child in module.modules():
            if not isinstance(child, Linear | Stack):
                continue
            if child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                outputs, inputs = child.weight.shape[-2:]
                groups[outputs, inputs].append(child)
    chosen = {}
    with torch.inference_mode():
        for shape, found in groups.items():
            weights = [w for part in found[:_WEIGHTS] for w in _matrices(part)][:_WEIGHTS]
            plan = tuple(
                _fastest(weights, rows) if rows in measured else _CANDIDATES[0]
                for rows in range(1, max(measured) + 1)
            )
            for part in found:
                part.plan = plan
            chosen[shape] = plan
    return chosen


def _matrices(part: Linear | Stack) -> list[torch.Tensor]:
    return [part.weight] if isinstance(part, Linear) else list(part.weight[:_WEIGHTS].unbind())


def _fastest(weights: list[torch.Tensor], rows: int) -> str:
    x = torch.randn(rows, weights[0].shape[1])
    times = {name: _seconds(PRODUCTS[name], x, weights) for name in _CANDIDATES}
    return min(times, key=lambda name: times[name])


def _seconds(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for weight in weights:
            product(x, weight)
        best = min(best, time.perf_counter() - started)
    return best
