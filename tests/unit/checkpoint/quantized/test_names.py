"""Quantised tensors are recognised by dtype and neighbours."""

from __future__ import annotations

import pytest
import torch
from support.quantized_tensors import fp8, source

from headstart.checkpoint.quantized.names import (
    is_quantized,
    is_scale,
    missing_scales,
    packed_names,
    scale_of,
    stale_scales,
)


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
