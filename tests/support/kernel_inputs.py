"""Inputs of products, the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.models.linear import Linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def layer_of(outputs: int, inputs: int) -> Linear:
    layer = Linear(0, 0)
    layer.weight = torch.nn.Parameter(random(outputs, inputs), requires_grad=False)
    return layer
