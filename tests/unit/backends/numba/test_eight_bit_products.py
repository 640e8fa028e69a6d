"""8-bit products of the compiled kernels: the dequantised ones, with a row's own bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headstart.checkpoint.quantized.weights import Fp8Weight, GroupWeight
from headstart.models.quantized import Fp8Linear, GroupLinear, QuantizedLinear, linear_of
from headstart.models.same_form import matched

pytest.importorskip("numba")

from headstart.backends.numba import thread_pool
from headstart.backends.numba.eight_bit_linear import PackedEightBits
from headstart.backends.numba.linear import PackedFloat
from headstart.backends.numba.weight_formats import packed_as_stored, widened_notes

NUMBERS = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def floats(outputs: int, inputs: int, *, in_blocks: bool = False) -> Fp8Linear:
    """All numbers of e4m3, scales of any size."""
    make = torch.Generator().manual_seed(outputs + inputs)
    chosen = torch.randint(0, len(NUMBERS), (outputs, inputs), generator=make)
    shape = (-(-outputs // 128), -(-inputs // 128)) if in_blocks else (outputs,)
    scales = torch.rand(shape, generator=make) + 0.01
    codes = NUMBERS[chosen].view(torch.float8_e4m3fn)
    return Fp8Linear(
        Fp8Weight(codes, scales), torch.randn(outputs, generator=make), torch.float32
    )  # fmt: skip


def integers(
    outputs: int, inputs: int, group: int, *, has_zeros: bool = False,
    scales: torch.dtype = torch.float16, is_ordered: bool = False,
) -> GroupLinear:  # fmt: skip
    make = torch.Generator().manual_seed(outputs + group)
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, generator=make)
    values = (torch.rand(outputs, inputs // group, generator=make) * 0.1 + 0.01).to(scales)
    zeros = torch.randint(0, 256, values.shape, dtype=torch.uint8, generator=make)
    order = torch.randperm(inputs, generator=make).to(torch.int32) if is_ordered else None
    weight = GroupWeight(8, codes, values, zeros if has_zeros else None, order)
    return GroupLinear(weight, torch.randn(outputs, generator=make), torch.float32)


CASES: dict[str, QuantizedLinear] = {
    "rows": floats(70, 60),
    "blocks, edges ragged": floats(300, 300, in_blocks=True),
    "groups of 32": integers(70, 96, 32),
    "groups of 64, zero points, bf16": integers(
        100, 128, 64, has_zeros=True, scales=torch.bfloat16
    ),
    "groups of 128, fp32": integers(32, 256, 128, scales=torch.float32),
    "rows with zero points, fp32": integers(40, 64, 64, has_zeros=True, scales=torch.float32),
    "sorted columns": integers(70, 128, 32, has_zeros=True, is_ordered=True),
}  # fmt: skip
each = pytest.mark.parametrize("case", CASES)


def packed(case: str) -> PackedEightBits:
    made = packed_as_stored(CASES[case])
    assert isinstance(made, PackedEightBits)
    return made


@each
def test_products_are_those_of_dequantised_weights(case: str) -> None:
    """Only the order of adding is another one: all weights are exact in float32."""
    source = CASES[case]
    weight, bias = source.dequantized(torch.float64), source.bias
    assert bias is not None
    x = torch.randn(19, weight.shape[1])
    size = x.double().abs() @ weight.abs().t()
    error = (packed(case)(x).double() - (x.double() @ weight.t() + bias.double())).abs()
    assert (error <= 4e-7 * size + 1e-6).all()


@each
def test_a_row_has_the_same_bits_alone_and_among_others(case: str) -> None:
    made = packed(case)
    x = torch.randn(17, made.shape[1])
    together = made(x)
    for row in range(17):
        assert torch.equal(made(x[row : row + 1])[0], together[row])
        assert torch.equal(made(x[row:]), together[row:])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = packed_as_stored(floats(960, 576, in_blocks=True))
    x = torch.randn(4, 576)
    alone = made(x)
    monkeypatch.setattr(thread_pool, "_MIN_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(20):
        assert torch.equal(made(x), alone)


@each
def test_some_outputs_only_are_the_same_products(case: str) -> None:
    """Of scales in blocks they become float32: the order of adding is another one."""
    made, chosen = packed(case), torch.tensor([4, 31, 20])
    x = torch.randn(3, made.shape[1])
    some = made.only_rows(chosen)
    if "blocks" in case:
        assert isinstance(some, PackedFloat)
        torch.testing.assert_close(some(x), made(x)[:, chosen], rtol=1e-4, atol=1e-2)
    else:
        assert torch.equal(some(x), made(x)[:, chosen])
    assert torch.equal(made.float_row(31), CASES[case].dequantized(torch.float32)[31])


def test_another_place_in_memory_and_no_rows() -> None:
    made, x = packed("rows"), torch.randn(3, 60)
    before = made(x)
    made.repack(made.weight.detach().clone())
    assert torch.equal(made(x), before)
    assert made(torch.zeros(0, 60)).shape == (0, 70)


def test_a_swap_takes_over_how_weights_lie() -> None:
    """Scales of rows and of blocks may take the same bytes; what tells them apart is written."""
    rows, blocks = (
        packed_as_stored(floats(64, 256)),
        packed_as_stored(floats(64, 256, in_blocks=True)),
    )
    x = torch.randn(3, 256)
    for old, new in matched(rows, blocks):
        old.copy_(new)
    assert torch.equal(rows(x), blocks(x))


def test_what_the_kernels_cannot_read_is_computed_in_float32() -> None:
    odd = floats(8, 62).quantized
    broken = floats(8, 64).quantized
    codes = broken.weight.view(torch.uint8).clone()
    codes[3, 5] = 0xFF
    no_number = replace(broken, weight=codes.view(torch.float8_e4m3fn))
    for weight in (odd, no_number, integers(8, 60, 30).quantized):
        made = packed_as_stored(linear_of(weight, None, torch.float32))
        assert isinstance(made, PackedFloat)
        (note,) = widened_notes([linear_of(weight, None, torch.float32)])
        assert note.startswith("1 weights that are stored quantised are computed in float32")
    assert not widened_notes([floats(8, 64), integers(8, 64, 32)])
    found = packed_as_stored(linear_of(no_number, None, torch.float32))(torch.randn(2, 64))
    assert found.isnan().any(0).tolist() == [row == 3 for row in range(8)]
