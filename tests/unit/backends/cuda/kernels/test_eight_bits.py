"""Rows in 8 bits, and products with weights of 8 and 4 bits, against PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernel_inputs import DEVICE, random
from torch import Tensor
from torch.nn.functional import silu

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_fp8

from headstart.backends.cuda.kernels.eight_bits import (
    Fp8Rows,
    IntegerRows,
    fp8_rows,
    integer_rows,
    silu_fp8,
    silu_integers,
)
from headstart.backends.cuda.kernels.fp8_products import choose_fp8, gated_fp8, partial_fp8
from headstart.backends.cuda.kernels.group_packing import (
    PackedGroups,
    dequantized_groups,
    half_for,
    packed_groups,
)
from headstart.backends.cuda.kernels.groups import choose_groups, partial_groups
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.wide_groups import WideCut, parted_rows, partial_wide

FP8 = torch.float8_e4m3fn
CUT = Shape(outputs=64, inputs=256, splits=2)


@pytest.fixture(autouse=True)
def _rounds_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        repair_fp8(monkeypatch)


def restored(rows: Fp8Rows | IntegerRows) -> Tensor:
    values = rows.values.float()
    group = rows.group or values.shape[1]
    values = values * rows.scales.repeat_interleave(group, 0)[: values.shape[1]].t()
    return values[::2] + values[1::2] if isinstance(rows, IntegerRows) else values


def rows_of(count: int, inputs: int) -> Tensor:
    """Of different sizes, and every group, too."""
    sizes = torch.logspace(-2, 1, count, device=DEVICE)[:, None]
    return random(count, inputs, seed=1) * sizes * torch.linspace(0.1, 3, inputs, device=DEVICE)


@pytest.mark.parametrize("group", [128, 64, 0])
def test_rows_become_the_nearest_8_bit_floats_of_their_group(group: int) -> None:
    x = rows_of(3, 576)  # the last group of 128 is half one
    x[1, :128] = 0
    made = fp8_rows(x, group)
    width = group or 576
    padded = torch.nn.functional.pad(x, (0, -576 % width)).view(3, -1, width)
    scales = padded.abs().amax(2) / 448
    torch.testing.assert_close(made.scales, scales.t().clamp(min=1e-12 / 448))
    wanted = (padded / scales.clamp(min=1e-12 / 448)[:, :, None]).flatten(1)[:, :576].to(FP8)
    assert (made.values.float() == wanted.float()).float().mean() > 0.999  # halves of a step
    assert not restored(made)[1, :128].any() or not group


def test_rows_of_integers_are_finer_than_bf16() -> None:
    x = rows_of(3, 200)
    made = integer_rows(x, 64)
    largest = torch.nn.functional.pad(x, (0, 56)).view(3, 4, 64).abs().amax(2)
    allowed = (largest / 127 / 250).repeat_interleave(64, 1)[:, :200]
    assert ((restored(made) - x).abs() <= allowed).all()
    sums = torch.nn.functional.pad(made.values.float(), (0, 56)).view(6, 4, 64).sum(2)
    assert torch.equal(made.sums, sums.t())


def test_silu_of_products_in_splits_is_rounded_at_once() -> None:
    product = random(2, 3, 2 * 200)
    gate, up = product.sum(0).chunk(2, -1)
    wanted = silu(gate) * up
    torch.testing.assert_close(restored(silu_integers(product, 64)), wanted, rtol=0, atol=1e-3)
    for group in (128, 0):
        floats, same = silu_fp8(product, group), fp8_rows(wanted.contiguous(), group)
        torch.testing.assert_close(floats.scales, same.scales)
        assert (floats.values.float() == same.values.float()).float().mean() > 0.99


def fp8_weight(outputs: int, inputs: int, *, blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales, and what they stand for."""
    values = (random(outputs, inputs) * 90).to(FP8)
    if not blocks:
        scales = torch.logspace(-2, 0, outputs, device=DEVICE)
        return values, scales, values.float() * scales[:, None]
    scales = 0.1 + random(-(-outputs // 128), -(-inputs // 128)).abs()
    wide = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    return values, scales, values.float() * wide


@pytest.mark.parametrize("streams", [False, True], ids=["threads", "copy engine"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "blocks"),
    [(3, 200, 576, 128, False), (5, 200, 576, 128, True), (20, 130, 256, 64, True),
     (2, 70, 256, 0, False)],
)  # fmt: skip
def test_fp8_by_fp8(
    rows: int, outputs: int, inputs: int, group: int, blocks: bool, streams: bool
) -> None:
    values, scales, weight = fp8_weight(outputs, inputs, blocks=blocks)
    x = fp8_rows(rows_of(rows, inputs), group)
    wanted = restored(x) @ weight.T
    found = partial_fp8(x, values, scales, CUT, streams=streams)
    assert found.shape == (2, rows, outputs)
    torch.testing.assert_close(found.sum(0), wanted, rtol=1e-4, atol=wanted.abs().max() * 1e-5)
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    ids = torch.arange(7, 7 + 3 * outputs, 3, device=DEVICE)
    chosen = choose_fp8(
        x, values, scales, zeros.float(), zeros, zeros, ids, Shape(64, 256), streams=streams
    )
    assert chosen.tolist() == ids[wanted.argmax(1)].tolist()


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_gate_and_up_in_one_pass(blocks: bool) -> None:
    values, scales, weight = fp8_weight(2 * 128, 200, blocks=blocks)
    x = fp8_rows(rows_of(3, 200) / 1000)
    gate, up = (restored(x) @ weight.T).chunk(2, -1)
    wanted = silu(gate) * up
    found = gated_fp8(x, values, scales, Shape(64, 128), dtype=torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=wanted.abs().max() * 1e-5)


def groups_of(
    outputs: int, inputs: int, *, bits: int, group: int, zeros: bool
) -> tuple[PackedGroups, Tensor]:
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=draw, dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (outputs, inputs // group), generator=draw)
    scales = (0.5 + torch.rand(outputs, inputs // group, generator=draw)).bfloat16()
    if not zeros:
        zero[:] = 1 << (bits - 1)
    weight = codes.float() - zero.repeat_interleave(group, 1).float()
    weight *= scales.float().repeat_interleave(group, 1)
    stored = codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)
    given = zero.to(torch.uint8).to(DEVICE) if zeros else None
    return packed_groups(stored.to(DEVICE), scales.to(DEVICE), given, bits), weight.to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "inputs", "bits", "group", "zeros"),
    [(3, 512, 4, 128, False), (2, 576, 4, 64, True), (20, 256, 4, 128, True), (2, 256, 4, 32, True),
     (3, 192, 8, 64, True)],
)  # fmt: skip
def test_groups_of_4_and_8_bits(rows: int, inputs: int, bits: int, group: int, zeros: bool) -> None:
    packed, weight = groups_of(130, inputs, bits=bits, group=group, zeros=zeros)
    assert torch.equal(dequantized_groups(packed, torch.float32), weight)
    x = rows_of(rows, inputs)
    made = integer_rows(x, packed.half)
    wanted = x @ weight.T
    found = partial_groups(made, packed, CUT)
    torch.testing.assert_close(found.sum(0), wanted, rtol=2e-4, atol=wanted.abs().max() * 2e-4)
    numbers = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    chosen = choose_groups(made, packed, numbers.float(), numbers, numbers)
    assert chosen.tolist() == wanted.argmax(1).tolist()


@pytest.mark.parametrize(
    ("rows", "inputs", "group", "zeros"), [(20, 512, 128, False), (17, 576, 64, True)]
)
def test_codes_of_4_bits_as_floats(rows: int, inputs: int, group: int, zeros: bool) -> None:
    """Rows keep all their bits: only the order of sums is another one."""
    packed, weight = groups_of(130, inputs, bits=4, group=group, zeros=zeros)
    x = rows_of(rows, inputs)
    wanted = x @ weight.T
    parted = parted_rows(x, packed.half)
    torch.testing.assert_close(parted.sums, x.view(rows, -1, packed.half).sum(2))
    found = partial_wide(parted, packed, WideCut(64, splits=2))
    assert found.shape == (2, rows, 130)
    torch.testing.assert_close(found.sum(0), wanted, rtol=1e-5, atol=wanted.abs().max() * 1e-5)
    other = partial_wide(replace(parted, values=x), packed, WideCut(64))
    assert (other[0] - wanted).abs().max() > 0.1 * wanted.abs().max(), "the control: as they were"


def test_halves_of_a_tile_divide_groups_and_rows() -> None:
    assert [half_for(4096, group, 4) for group in (128, 64, 32, 4096)] == [128, 64, 32, 128]
    assert half_for(576, 64, 4) == 32 and half_for(576, 64, 8) == 64
    assert half_for(48, 24, 4) is None
