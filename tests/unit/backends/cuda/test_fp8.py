"""Weights in 8-bit floats: what is rounded, and by how much."""

from __future__ import annotations

import torch
from torch import nn

from headstart.backends.cuda.fp8 import LARGEST, Fp8Linear
from headstart.backends.weights import convert_weights
from headstart.models.linear import Linear


def source(outputs: int = 6, inputs: int = 64, *, bias: bool = False) -> Linear:
    made = Linear(inputs, outputs, bias=bias)
    generator = torch.Generator().manual_seed(outputs)
    sizes = torch.logspace(-4, 2, outputs)[:, None]
    made.weight.data = torch.randn(outputs, inputs, generator=generator) * sizes
    if made.bias is not None:
        made.bias.data = torch.arange(outputs).float()
    return made


def test_every_row_uses_the_whole_range_and_rounds_to_4_bits() -> None:
    plain = source()
    made = Fp8Linear(plain)
    assert made.weight.dtype == torch.float8_e4m3fn and made.scales.dtype == torch.float32
    assert made.weight.float().abs().amax(dim=1).tolist() == [LARGEST] * 6
    values = plain.weight
    error = (made.dequantized(torch.float32) - values).abs()
    # Half a step of a number with 3 stored bits, or of the smallest one that the format has.
    bound = torch.maximum(values.abs() / 16, made.scales[:, None] * 2.0**-10)
    assert (error <= bound * 1.0001).all()
    assert (error > values.abs() / 64).any()  # control: it is rounded at all


def test_rows_of_zeros_stay_zeros() -> None:
    plain = source()
    plain.weight.data[2] = 0
    made = Fp8Linear(plain).dequantized(torch.float32)
    assert not made[2].any() and made[1].any() and made.isfinite().all()


def test_the_product_its_bias_and_some_of_its_rows() -> None:
    made = Fp8Linear(source(bias=True))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    whole = x @ made.dequantized(torch.float32).T
    torch.testing.assert_close(made(x), whole + torch.arange(6.0))
    ids = torch.tensor([1, 4])
    torch.testing.assert_close(made.only_rows(ids)(x), whole[:, ids])


def test_a_tied_embedding_keeps_its_numbers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = source()
            self.embed = self.lm_head.weight

    model = Tied()
    before = model.embed.clone()
    convert_weights(model, Fp8Linear)
    assert isinstance(model.lm_head, Fp8Linear)
    assert torch.equal(model.embed, before) and model.embed.dtype == torch.float32


def test_long_matrices_are_rounded_in_parts_alike() -> None:
    long = source(5000, 8)
    made = Fp8Linear(long)
    last = Linear(8, 10)
    last.weight.data = long.weight[-10:].clone()
    assert torch.equal(
        made.dequantized(torch.float32)[-10:], Fp8Linear(last).dequantized(torch.float32)
    )
