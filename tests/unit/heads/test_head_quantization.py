"""Quantised tensors are recognised by dtype and neighbours, and turned back exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load
from headstart.errors import ShapeMismatch, UnsupportedFamily
from headstart.checkpoint.quantized.names import (
    dequantized,
    is_quantized,
    is_scale,
    missing_scales,
    packed_names,
    scale_of,
    stale_scales,
)

_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32",
}  # fmt: skip


def source(tensor: torch.Tensor) -> TensorSource:
    data = bytes(as_bytes(tensor.reshape(-1)))
    return TensorSource(_NAMES[tensor.dtype], tuple(tensor.shape), lambda: (data,), is_copy=False)


def fp8(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "name",
    ["a.weight_scale_inv", "a.weight_scale", "a.scale", "a.experts.down_proj_scale_inv", "a.g_idx"],
)
def test_companions_of_a_weight_are_scales(name: str) -> None:
    assert is_scale(name)


@pytest.mark.parametrize(
    "name", ["a.weight", "a.bias", "modules.0.hc_head.scale", "modules.0.block.hc_attn_scale"]
)
def test_weights_are_not_scales_whatever_their_name(name: str) -> None:
    assert not is_scale(name)


def test_a_weight_may_be_stored_packed() -> None:
    assert packed_names("a.weight") == ["a.weight", "a.weight_packed", "a.qweight", "a.weight_q"]


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("a.weight", "a.weight_scale_inv"),
        ("a.weight", "a.weight_scale"),
        ("a.weight", "a.scale"),
        ("experts.down_proj", "experts.down_proj_scale_inv"),
    ],
)
def test_the_scale_beside_a_weight_is_found(name: str, scale: str) -> None:
    assert scale_of(name, {name: None, scale: None}) == scale
    assert scale_of(name, {name: None}) is None


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("a.weight", torch.zeros(2, 2, dtype=torch.float8_e4m3fn), True),
        ("a.weight", torch.zeros(2, 2, dtype=torch.int8), True),
        ("a.weight", torch.zeros(2, 2, dtype=torch.bfloat16), False),
        ("a.qweight", torch.zeros(2, 2, dtype=torch.int32), True),
        ("a.weight_scale", torch.zeros(2, dtype=torch.float8_e4m3fn), False),
    ],
    ids=["fp8", "int8", "bf16", "packed", "fp8 scale"],
)
def test_quantised_weights_are_told_by_what_is_stored(
    name: str, tensor: torch.Tensor, expected: bool
) -> None:
    assert is_quantized(name, source(tensor)) is expected


def test_a_lost_scale_is_named_as_the_other_scales_are() -> None:
    tensors = {
        "a.weight": source(fp8(2, 2)),
        "a.weight_scale": source(torch.ones(2, 1)),
        "b.weight": source(fp8(2, 2)),
    }
    assert missing_scales(tensors) == ["b.weight_scale"]


def test_a_scale_beside_a_plain_weight_is_stale() -> None:
    tensors = {
        "a.weight": source(torch.ones(2, 2)),
        "a.weight_scale_inv": source(torch.ones(1, 1)),
        "b.weight": source(fp8(2, 2)),
        "b.weight_scale_inv": source(torch.ones(1, 1)),
    }
    assert stale_scales(tensors) == ["a.weight_scale_inv"]


@pytest.mark.parametrize("shape", [(256, 256), (200, 130), (1, 1), (128, 300)], ids=str)
def test_blocks_are_multiplied_by_their_scale(shape: tuple[int, int]) -> None:
    weight = fp8(*shape)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    tensors = {"a.weight": source(weight), "a.weight_scale_inv": source(scale)}
    expected = weight.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            expected[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
    assert torch.equal(load(dequantized("a.weight", tensors)), expected.bfloat16())


@pytest.mark.parametrize("shape", [(2, 120, 64), (3, 128, 130), (2, 200, 300)], ids=str)
def test_no_block_of_fused_experts_reaches_into_the_next_expert(
    shape: tuple[int, int, int],
) -> None:
    weight = fp8(*shape)
    scale = torch.rand(shape[0], -(-shape[1] // 128), -(-shape[2] // 128)) + 0.5
    scale[1] *= 100
    name = "a.experts.down_proj"
    tensors = {name: source(weight), f"{name}_scale_inv": source(scale)}
    expected = weight.float()
    for expert, row in itertools.product(range(shape[0]), range(shape[1])):
        for column in range(0, shape[2], 128):
            part = expected[expert, row, column : column + 128]
            part *= scale[expert, row // 128, column // 128]
    assert torch.equal(load(dequantized(name, tensors)), expected.bfloat16())


@pytest.mark.parametrize("scale_shape", [(2, 120), (2, 120, 1)], ids=str)
def test_rows_of_fused_experts_are_multiplied_by_their_scale(scale_shape: tuple[int, ...]) -> None:
    weight, scale = fp8(2, 120, 7), torch.rand(scale_shape) + 0.5
    tensors = {"experts.down_proj": source(weight), "experts.down_proj_scale": source(scale)}
    expected = (weight.float() * scale.reshape(2, 120, 1)).bfloat16()
    assert torch.equal(load(dequantized("experts.down_proj", tensors)), expected)


def test_blocks_that_would_cross_experts_are_refused() -> None:
    """240 rows in all would make two blocks of 128, but the first holds rows of both experts."""
    name = "experts.down_proj"
    tensors = {name: source(fp8(2, 120, 64)), f"{name}_scale_inv": source(torch.ones(2, 1))}
    with pytest.raises(ShapeMismatch, match="of each expert"):
        dequantized(name, tensors)


@pytest.mark.parametrize("scale_shape", [(5,), (5, 1), (), (1,)], ids=str)
def test_rows_or_all_are_multiplied_by_their_scale(scale_shape: tuple[int, ...]) -> None:
    weight, scale = fp8(5, 7), torch.rand(scale_shape) + 0.5
    tensors = {"a.weight": source(weight), "a.weight_scale": source(scale)}
    factor = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    expected = (weight.float() * factor).bfloat16()
    assert torch.equal(load(dequantized("a.weight", tensors)), expected)


def test_a_scale_of_another_shape_is_refused() -> None:
    tensors = {"a.weight": source(fp8(256, 256)), "a.weight_scale_inv": source(torch.ones(3, 2))}
    with pytest.raises(ShapeMismatch, match="do not belong together"):
        dequantized("a.weight", tensors)


def test_a_packing_that_cannot_be_read_is_refused() -> None:
    tensors = {"a.qweight": source(torch.zeros(2, 2, dtype=torch.int32))}
    with pytest.raises(UnsupportedFamily, match="cannot be dequantised here"):
        dequantized("a.qweight", tensors)


@pytest.mark.parametrize(
    ("ranks", "rows", "num_scales"), [(8, 3392, 216), (4, 256, 8), (1, 300, 3)]
)
def test_a_fused_qkv_has_blocks_of_its_own_for_each_rank(
    ranks: int, rows: int, num_scales: int
) -> None:
    """MiMo-V2.5-Pro: 8 x 3392 rows have 8 x 27 rows of scales, not the 212 of 27136 rows."""
    rows *= ranks
    weight = fp8(rows, 130)
    scale = torch.rand(num_scales, 2) + 0.5
    name = "modules.0.block.self_attn.qkv_proj.weight"
    names = {name: source(weight), f"{name}_scale_inv": source(scale)}
    per_rank, blocks = rows // ranks, num_scales // ranks
    index = torch.tensor([(r // per_rank) * blocks + (r % per_rank) // 128 for r in range(rows)])
    expected = weight.float() * scale[index].repeat_interleave(128, 1)[:, :130]
    assert torch.equal(load(dequantized(name, names)), expected.bfloat16())


def test_scales_that_fit_no_or_two_numbers_of_ranks_are_refused() -> None:
    for name, num_scales in (
        ("a.qkv_proj.weight", 15),
        ("a.qkv_proj.weight", 16),
        ("a.o_proj.weight", 16),
    ):
        names = {
            name: source(fp8(1696, 128)),
            f"{name}_scale_inv": source(torch.ones(num_scales, 1)),
        }
        with pytest.raises(ShapeMismatch, match="do not belong together"):
            dequantized(name, names)


def test_experts_of_which_there_are_none_are_refused() -> None:
    name = "a.experts.down_proj"
    tensors = {name: source(fp8(0, 4, 4)), f"{name}_scale": source(torch.ones(0, 4, 1))}
    with pytest.raises(ShapeMismatch, match=r"down_proj \(0, 4, 4\); expected one value"):
        dequantized(name, tensors)
