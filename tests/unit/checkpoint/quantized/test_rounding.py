"""Rounding to 4 bits in groups: near, nearer than without a search, and blank groups stay blank."""

from __future__ import annotations

import pytest
import torch

from headstart.checkpoint.quantized.rounding import int4_groups


def values(outputs: int = 64, inputs: int = 128) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))


def simple_error(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """Of the usual rule: the number farthest from zero becomes -8."""
    parts = matrix.view(len(matrix), -1, group)
    extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    scales = extreme / -8
    return ((parts / scales).round().clamp(-8, 7) * scales - parts).square().mean()


@pytest.mark.parametrize("group", [32, 64])
def test_the_search_finds_better_scales_than_the_extreme_gives(group: int) -> None:
    matrix = values()
    rounded = int4_groups(matrix, group)
    assert rounded.group_size == group and rounded.zeros is None
    error = (rounded.dequantized(torch.float32) - matrix).square().mean()
    assert error < 0.995 * simple_error(matrix, group)
    kept = rounded.dequantized(torch.float32).view(64, -1, group).abs().amax(2)
    largest = matrix.view(64, -1, group).abs().amax(2)
    assert ((kept / largest - 1).abs() < 0.08).all(), "no extreme is cut"


def test_numbers_on_a_grid_are_kept() -> None:
    scales = torch.tensor([[0.5, 0.03125], [2.0**-20, 3.0]]).repeat_interleave(32, dim=1)
    codes = torch.randint(-8, 8, (2, 64), generator=torch.Generator().manual_seed(2))
    codes[:, ::32] = -8
    matrix = codes * scales
    assert torch.equal(int4_groups(matrix).dequantized(torch.float32), matrix)


def test_blank_groups_and_other_number_formats() -> None:
    matrix = values()
    matrix[3, 32:64] = 0
    rounded = int4_groups(matrix.bfloat16())
    assert not rounded.dequantized(torch.float32)[3, 32:64].any()
    assert not rounded.dequantized(torch.float32).isnan().any()
    assert torch.equal(rounded.codes(), int4_groups(matrix.bfloat16().float()).codes())


def test_scales_have_no_more_bits_than_kernels_keep() -> None:
    mantissas, _ = torch.frexp(int4_groups(values()).scales)
    assert torch.equal((mantissas * 2**11).round(), mantissas * 2**11)
