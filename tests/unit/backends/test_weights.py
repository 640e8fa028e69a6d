"""int8 products of any width; torch's own is wrong where it is no multiple of 16."""

from __future__ import annotations

import pytest
import torch

from headstart.backends.weights import Int8Linear
from headstart.models.linear import Linear


@pytest.mark.parametrize("inputs", [16, 24, 37])
def test_a_product_of_any_width(inputs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = Linear(inputs, 20)
    layer.weight.data = torch.randn(20, inputs, generator=draw)
    x = torch.randn(3, inputs, generator=draw)
    wanted = x @ layer.weight.T
    found = Int8Linear(layer)(x)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02
    few = Int8Linear(layer).only_rows(torch.tensor([4, 7]))(x)
    torch.testing.assert_close(few, found[:, [4, 7]])
