"""Quantised matrices that compute: what is rounded, which element is where, which memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headstart.backends.weights import convert_weights
from headstart.checkpoint.quantized.weights import Fp8Weight, GroupWeight, pack_nibbles
from headstart.models import quantized
from headstart.models.linear import Linear
from headstart.models.quantized import (
    Fp8Linear,
    Fp8Stack,
    GroupLinear,
    GroupStack,
    QuantizedLinear,
    quantized_module,
)

LARGEST = torch.finfo(torch.float8_e4m3fn).max
DRAW = torch.Generator().manual_seed(7)


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
    made = Fp8Linear.of(plain)
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
    made = Fp8Linear.of(plain).dequantized(torch.float32)
    assert not made[2].any() and made[1].any() and made.isfinite().all()


def test_the_product_its_bias_and_some_of_its_rows() -> None:
    made = Fp8Linear.of(source(bias=True))
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
    convert_weights(model, Fp8Linear.of)
    assert isinstance(model.lm_head, Fp8Linear)
    assert torch.equal(model.embed, before) and model.embed.dtype == torch.float32


def test_long_matrices_are_rounded_in_parts_alike() -> None:
    long = source(5000, 8)
    made = Fp8Linear.of(long)
    last = Linear(8, 10)
    last.weight.data = long.weight[-10:].clone()
    assert torch.equal(
        made.dequantized(torch.float32)[-10:], Fp8Linear.of(last).dequantized(torch.float32)
    )


def fp8_blocks(rows: int, columns: int, *leading: int) -> Fp8Weight:
    values = torch.randn(*leading, rows, columns, generator=DRAW).to(torch.float8_e4m3fn)
    blocks = (*leading, -(-rows // 128), -(-columns // 128))
    return Fp8Weight(values, torch.rand(blocks, generator=DRAW) + 0.5)


def groups(
    rows: int, columns: int, *leading: int, bits: int = 4, size: int = 16, has_zeros: bool = True
) -> GroupWeight:
    shape = (*leading, rows, columns)
    codes = torch.randint(0, 2**bits, shape, generator=DRAW, dtype=torch.uint8)
    scales = torch.rand(*leading, rows, columns // size, generator=DRAW).half() + 0.5
    zeros = torch.randint(0, 2**bits, scales.shape, generator=DRAW, dtype=torch.uint8)
    packed = pack_nibbles(codes) if bits == 4 else codes
    return GroupWeight(bits, packed, scales, zeros if has_zeros else None)


def test_blocks_of_128_end_where_the_matrix_does() -> None:
    weight = fp8_blocks(200, 130)
    found = weight.dequantized(torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 129), (199, 128)):
        scale = weight.scales[row // 128, column // 128]
        assert found[row, column] == weight.weight[row, column].float() * scale


def test_of_two_codes_in_a_byte_the_even_element_is_the_low_one() -> None:
    scales = torch.tensor([[2.0, 0.5]]).half()
    weight = GroupWeight(4, torch.tensor([[0x21, 0xF0]], dtype=torch.uint8), scales)
    assert weight.shape == (1, 4) and weight.group_size == 2
    assert weight.dequantized(torch.float32).tolist() == [[-14.0, -12.0, -4.0, 3.5]]
    zeros = torch.tensor([[1, 15]], dtype=torch.uint8)
    moved = GroupWeight(4, weight.weight, scales, zeros)
    assert moved.dequantized(torch.float32).tolist() == [[0.0, 2.0, -7.5, 0.0]]


def test_columns_that_were_sorted_by_group_go_back_to_their_places() -> None:
    weight = groups(3, 32, size=8)
    order = torch.randperm(32, generator=DRAW).int()
    sorted_ = GroupWeight(4, weight.weight, weight.scales, weight.zeros, order)
    held = weight.dequantized(torch.float32)
    assert torch.equal(sorted_.dequantized(torch.float32)[:, order], held)
    x = torch.randn(2, 32, generator=DRAW)
    torch.testing.assert_close(GroupLinear(sorted_)(x), x[:, order] @ held.T)


@pytest.mark.parametrize(
    "weight",
    [
        fp8_blocks(300, 96),
        Fp8Weight(fp8_blocks(300, 96).weight, torch.rand(300, generator=DRAW)),
        groups(300, 96),
        groups(300, 96, bits=8, has_zeros=False),
    ],
    ids=["fp8-block", "fp8-row", "int4-group", "int8-group"],
)
def test_a_product_is_that_of_the_dequantised_matrix_in_parts_and_with_a_bias(
    weight: Fp8Weight | GroupWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, bias = torch.randn(3, 96, generator=DRAW), torch.randn(300, generator=DRAW)
    made = quantized_module(weight, bias, torch.float32)
    assert isinstance(made, QuantizedLinear) and made.quantized.form == weight.form
    wanted = x @ weight.dequantized(torch.float32).T
    torch.testing.assert_close(made(x), wanted + bias)
    monkeypatch.setattr(quantized, "_VALUES", 1)  # 128 rows at a time, the last ones fewer
    assert len(quantized._pieces(weight)) == 3
    torch.testing.assert_close(made(x), wanted + bias)
    ids = torch.tensor([299, 5, 130])
    torch.testing.assert_close(made.only_rows(ids)(x), wanted[:, ids])


@pytest.mark.parametrize("weight", [fp8_blocks(130, 64, 3), groups(12, 64, 3)])
def test_experts_are_stacked(weight: Fp8Weight | GroupWeight) -> None:
    made = quantized_module(weight, None, torch.float32)
    assert isinstance(made, Fp8Stack | GroupStack)
    x = torch.randn(2, 64, generator=DRAW)
    for number in range(3):
        wanted = x @ weight.dequantized(torch.float32)[number].T
        torch.testing.assert_close(made.product()(x, number), wanted)


def test_changing_a_models_type_leaves_what_is_stored() -> None:
    made = nn.Sequential(GroupLinear(groups(4, 32)), Fp8Linear(fp8_blocks(4, 32)))
    before = [value.clone() for value in made.state_dict().values()]
    made.to(torch.bfloat16)
    after = list(made.state_dict().values())
    assert [value.dtype for value in after] == [value.dtype for value in before]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(after, before, strict=True))
