"""int8 products of the compiled kernels: right, and of the same bits whatever rows come along."""

from __future__ import annotations

import pytest
import torch

from headstart.models.linear import Linear

pytest.importorskip("numba")

from headstart.backends.numba import products, thread_pool
from headstart.backends.numba.linear import PackedLinear

WIDTHS = [(70, 33), (32, 64), (5, 3), (960, 576)]


def layer(outputs: int, inputs: int) -> Linear:
    torch.manual_seed(outputs)
    result = Linear(inputs, outputs, bias=True)
    result.weight.data.normal_()
    assert result.bias is not None
    result.bias.data.normal_()
    return result


@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_unpacking_gives_back_what_was_packed(shape: tuple[int, int]) -> None:
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    assert torch.equal(products.unpack(products.pack(weight), *shape), weight)


@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_products_are_those_of_the_rounded_weights(shape: tuple[int, int]) -> None:
    source, x = layer(*shape), torch.randn(19, shape[1])
    packed = PackedLinear(source)
    stored = products.unpack(packed.weight, *shape).double() * packed.scales.double()[:, None]
    assert (stored - source.weight).abs().max() <= packed.scales.max() * 0.5001
    assert source.bias is not None
    expected = x.double() @ stored.t() + source.bias
    # Inputs are rounded to 1/32767 of the largest in their row.
    allowed = x.abs().amax() / packed.levels * stored.abs().sum(1).max()
    assert packed.levels > 2**13
    assert (packed(x) - expected).abs().max() < allowed


@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(shape: tuple[int, int]) -> None:
    packed, x = PackedLinear(layer(*shape)), torch.randn(17, shape[1])
    together = packed(x)
    for row in range(17):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])
        assert torch.equal(packed(x[row:]), together[row:])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = PackedLinear(layer(960, 576)), torch.randn(4, 576)
    alone = packed(x)
    monkeypatch.setattr(thread_pool, "_MIN_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(50):
        assert torch.equal(packed(x), alone)


def test_sums_stay_within_32_bits() -> None:
    """All inputs and weights as large as they get, with the same sign."""
    source = Linear(40000, 1)
    source.weight.data.fill_(1.0)
    packed = PackedLinear(source)
    assert packed.levels == (2**31 - 1) // (127 * 40000)
    assert packed(torch.ones(1, 40000)).item() == pytest.approx(40000, rel=1e-6)


def test_blank_rows_and_no_rows() -> None:
    source = layer(70, 33)
    packed = PackedLinear(source)
    assert source.bias is not None
    assert torch.equal(packed(torch.zeros(2, 33)), source.bias.expand(2, 70))
    assert packed(torch.zeros(0, 33)).shape == (0, 70)


def test_some_outputs_only_and_other_number_formats() -> None:
    packed, x, chosen = PackedLinear(layer(70, 33)), torch.randn(3, 33), torch.tensor([4, 69])
    assert packed.only_rows(chosen).levels == packed.levels
    torch.testing.assert_close(packed.only_rows(chosen)(x), packed(x)[:, chosen])
    assert packed(x.bfloat16()).dtype == torch.bfloat16
