"""float32 products of the compiled kernels: right, with the same bits whatever rows come along."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headstart.models.linear import Linear

pytest.importorskip("numba")

from headstart.backends.numba import float_products, thread_pool
from headstart.backends.numba.linear import PackedFloat

WIDTHS = [(70, 33), (32, 64), (5, 3), (960, 576)]


def layer(outputs: int, inputs: int, *, bias: bool = True) -> Linear:
    torch.manual_seed(outputs)
    result = Linear(inputs, outputs, bias=bias)
    result.weight.data.normal_()
    if result.bias is not None:
        result.bias.data.normal_()
    return result


@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_unpacking_gives_back_what_was_packed(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(float_products.unpack(float_products.pack(weight), shape[0]), weight)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_products_are_those_of_torch(shape: tuple[int, int], bias: bool) -> None:
    source, x = layer(*shape, bias=bias), torch.randn(19, shape[1])
    torch.testing.assert_close(PackedFloat(source)(x), source(x), rtol=1e-4, atol=1e-4)
    some = torch.tensor([0, shape[0] - 1, 2])
    expected = source(x)[:, some]
    torch.testing.assert_close(
        PackedFloat(source).only_rows(some)(x), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(shape: tuple[int, int]) -> None:
    packed, x = PackedFloat(layer(*shape)), torch.randn(17, shape[1])
    together = packed(x)
    for row in range(17):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])
        assert torch.equal(packed(x[row:]), together[row:])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = PackedFloat(layer(960, 576)), torch.randn(4, 576)
    alone = packed(x)
    monkeypatch.setattr(thread_pool, "_MIN_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(50):
        assert torch.equal(packed(x), alone)


def test_no_rows_and_a_view_elsewhere() -> None:
    packed = PackedFloat(layer(70, 33))
    assert packed(torch.zeros(0, 33)).shape == (0, 70)
    x = torch.randn(3, 33)
    before = packed(x)
    packed.repack(packed.weight.detach().clone())
    assert isinstance(packed.weight, nn.Parameter)
    assert torch.equal(packed(x), before)
