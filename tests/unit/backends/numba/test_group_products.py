"""4-bit products of the compiled kernels: those of the plain module, with a row's own bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headstart.checkpoint.quantized.weights import GroupWeight, pack_nibbles
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Linear, GroupLinear

pytest.importorskip("numba")

from headstart.backends.numba import group_products, thread_pool
from headstart.backends.numba.compiler import njit
from headstart.backends.numba.eight_bit_linear import PackedEightBits
from headstart.backends.numba.group_sums import MIDDLE, POINTS, TOGETHER, UPPER, for_rows
from headstart.backends.numba.linear import Packed, PackedFloat, PackedGroups, PackedLinear
from headstart.backends.numba.weight_formats import FORMS, packed_as_stored

SHAPES = [(70, 64, 32), (32, 128, 64), (5, 96, 32), (100, 256, 128), (96, 576, 576)]


def grouped(
    outputs: int, inputs: int, group: int, *, has_zeros: bool = True, is_ordered: bool = False
) -> GroupLinear:
    """As a checkpoint would give it, with scales that float16 holds."""
    make = torch.Generator().manual_seed(outputs + group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=make)
    scales = torch.rand(outputs, inputs // group, generator=make).half() * 0.1 + 0.01
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=make)
    order = torch.randperm(inputs, generator=make).to(torch.int32) if is_ordered else None
    weight = GroupWeight(
        4, pack_nibbles(codes), scales.bfloat16(), zeros if has_zeros else None, order
    )
    return GroupLinear(weight, torch.randn(outputs, generator=make), torch.float32)


def close(found: torch.Tensor, source: GroupLinear, x: torch.Tensor) -> bool:
    """Inputs are rounded to 1/127 of the largest in their group: half of that for every one."""
    weight = source.dequantized(torch.float64).abs()
    allowed = x.abs().amax() / 127 / 2 * weight.sum(1) * 1.01 + 1e-4
    return bool(((found - source(x)).abs() <= allowed).all())


@pytest.mark.parametrize("has_zeros", [True, False], ids=["zeros", "symmetric"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_plain_module(
    shape: tuple[int, int, int], has_zeros: bool
) -> None:
    source, x = grouped(*shape, has_zeros=has_zeros), torch.randn(19, shape[1])
    packed = packed_as_stored(source)
    assert isinstance(packed, PackedGroups)
    assert close(packed(x), source, x)
    # Integers within 127 are rounded to themselves: only the order of adding is another one.
    whole = torch.randint(-127, 128, (3, shape[1])).float()
    whole[:, :: packed.part] = 127
    torch.testing.assert_close(packed(whole), source(whole), rtol=1e-5, atol=1e-3)


def test_columns_in_another_order() -> None:
    source = grouped(70, 128, 32, is_ordered=True)
    packed, x = packed_as_stored(source), torch.randn(4, 128)
    assert close(packed(x), source, x)
    assert not close(PackedGroups(grouped(70, 128, 32))(x), source, x), "the order counts"
    chosen = torch.tensor([3, 69])
    assert torch.equal(packed.only_rows(chosen)(x), packed(x)[:, chosen])


@pytest.mark.parametrize("has_zeros", [True, False], ids=["zeros", "symmetric"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_unpacking_gives_back_what_was_packed(shape: tuple[int, int, int], has_zeros: bool) -> None:
    weight = grouped(*shape, has_zeros=has_zeros).quantized
    packed, factors = group_products.pack(weight)
    found = group_products.unpack(packed, factors, shape[1], shape[2], has_zeros=has_zeros)
    assert torch.equal(found.dequantized(torch.float32), weight.dequantized(torch.float32))
    assert (found.zeros is not None) == has_zeros


def test_scales_far_from_those_of_float16_keep_their_bits() -> None:
    weight = grouped(40, 64, 32).quantized
    for size in (2.0**-60, 2.0**60):
        other = replace(weight, scales=(weight.scales.float() * size))
        packed, factors = group_products.pack(other)
        found = group_products.unpack(packed, factors, 64, 32, has_zeros=True)
        assert torch.equal(found.scales, other.scales)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(shape: tuple[int, int, int]) -> None:
    packed, x = packed_as_stored(grouped(*shape)), torch.randn(17, shape[1])
    together = packed(x)
    for row in range(17):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])
        assert torch.equal(packed(x[row:]), together[row:])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = packed_as_stored(grouped(960, 576, 32)), torch.randn(4, 576)
    alone = packed(x)
    monkeypatch.setattr(thread_pool, "_MIN_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(50):
        assert torch.equal(packed(x), alone)


def test_blank_rows_and_no_rows() -> None:
    source = grouped(70, 64, 32)
    packed = packed_as_stored(source)
    assert source.bias is not None
    assert torch.equal(packed(torch.zeros(2, 64)), source.bias.expand(2, 70))
    assert packed(torch.zeros(0, 64)).shape == (0, 70)


def test_some_outputs_only_and_another_place_in_memory() -> None:
    packed, x, chosen = packed_as_stored(grouped(70, 64, 32)), torch.randn(3, 64), [4, 69, 20]
    assert torch.equal(packed.only_rows(torch.tensor(chosen))(x), packed(x)[:, chosen])
    before = packed(x)
    packed.repack(packed.weight.detach().clone())
    assert torch.equal(packed(x), before)


_plain_two = for_rows(2, is_plain=True)


@njit()
def _by_pairs(tile, zeros, inputs, scales, sums, lines, out):
    _plain_two(
        tile.ctypes.data, zeros.ctypes.data, 0, inputs.ctypes.data, inputs.shape[1],
        scales.ctypes.data, sums.ctypes.data, scales.shape[1], 1, lines, out.ctypes.data,
    )  # fmt: skip


def test_processors_without_the_instruction_get_the_same_sums() -> None:
    weight = grouped(32, 64, 32, has_zeros=False).quantized
    packed, factors = group_products.pack(weight)
    inputs = torch.randint(-127, 128, (2, 64), dtype=torch.int8)
    sums = inputs.view(2, 2, 32).sum(2, dtype=torch.int32)
    zeros = torch.full((POINTS,), MIDDLE * (1 + UPPER), dtype=torch.uint8)
    out = torch.empty(2, 32)
    arrays = (packed[0], zeros, inputs, torch.ones(2, 2), sums)
    _by_pairs(*(array.numpy() for array in arrays), 32 // TOGETHER, out.numpy())
    expected = inputs.float() @ weight.dequantized(torch.float32).t()
    torch.testing.assert_close(out * factors, expected, rtol=1e-5, atol=1e-3)


def plain(outputs: int, inputs: int) -> Linear:
    result = Linear(inputs, outputs)
    result.weight.data.normal_()
    return result


def test_which_form_each_matrix_gets() -> None:
    eight = replace(grouped(8, 64, 32).quantized, bits=8)
    odd = GroupWeight(4, torch.zeros(8, 24, dtype=torch.uint8), torch.ones(8, 2))
    fp8 = Fp8Linear.of(plain(8, 64))
    kinds: dict[str, list[type[Packed]]] = {
        "as-dtype": [PackedFloat, PackedGroups, PackedEightBits, PackedFloat, PackedEightBits],
        "int8": [PackedLinear, PackedGroups, PackedEightBits, PackedFloat, PackedEightBits],
        "int4": [PackedGroups, PackedGroups, PackedEightBits, PackedFloat, PackedEightBits],
    }
    others = [GroupLinear(weight, None, torch.float32) for weight in (eight, odd)]
    for weights, expected in kinds.items():
        sources = [plain(8, 64), grouped(8, 64, 32), *others, fp8]
        assert [type(FORMS[weights](source)) for source in sources] == expected
    assert isinstance(FORMS["int4"](plain(8, 40)), PackedLinear), "no whole number of groups"
    for source in (*others, fp8):
        x = torch.randn(2, source.quantized.shape[1])
        torch.testing.assert_close(packed_as_stored(source)(x), source(x), rtol=1e-4, atol=1e-4)


def test_8_bits_by_row_are_multiplied_in_integers_and_others_in_floats() -> None:
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (70, 96), dtype=torch.uint8, generator=make)
    codes[0] = 0  # -128 in every place: the largest sums that there are
    scales = torch.rand(70, 1, generator=make) * 0.1 + 0.01
    source = GroupLinear(GroupWeight(8, codes, scales), torch.randn(70, generator=make))
    x = torch.randn(5, 96, generator=make)
    packed = packed_as_stored(source)
    assert isinstance(packed, PackedLinear)
    torch.testing.assert_close(packed(x), source(x), rtol=1e-3, atol=0.02)
    torch.testing.assert_close(packed.only_rows(torch.tensor([3, 0]))(x), packed(x)[:, [3, 0]])
    zeros = torch.full((70, 1), 100, dtype=torch.uint8)
    for weight in (
        GroupWeight(8, codes, scales, zeros), GroupWeight(8, codes, scales.expand(70, 3)),
    ):  # fmt: skip
        assert isinstance(packed_as_stored(GroupLinear(weight)), PackedEightBits)
