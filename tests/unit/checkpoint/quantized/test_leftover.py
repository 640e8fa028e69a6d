"""Scales that no weight is read with are told or refused, in trunks and in heads."""

from __future__ import annotations

import pytest
import torch
from support.quantized_tensors import fp8, source

from headstart.checkpoint.quantized.leftover import weights_among
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.errors import UnsupportedFamily


def sorted_out(tensors: dict[str, torch.Tensor]) -> tuple[set[str], list[str], list[str]]:
    notes: list[str] = []
    sources = {name: source(tensor) for name, tensor in tensors.items()}
    weights, left = weights_among(sources, quantized_weights(sources, {}), notes)
    return set(weights), left, notes


@pytest.mark.parametrize(
    ("name", "scale", "dtype"),
    [
        ("a.q_proj.weight", "a.q_proj.weight_scale", torch.int32),
        ("a.experts.gate_up_proj", "a.experts.gate_up_proj_scale", torch.int8),
    ],
)
def test_integers_beside_a_scale_are_no_plain_weight(
    name: str, scale: str, dtype: torch.dtype
) -> None:
    stored = {name: torch.ones(2, 2).to(dtype), scale: torch.ones(2, 1)}
    with pytest.raises(UnsupportedFamily, match=rf"{name} is stored as I\d+ beside {scale}"):
        sorted_out(stored)
    # The control: the same names with a plain weight.
    names, left, notes = sorted_out({**stored, name: torch.ones(2, 2)})
    assert names == {name} and left == []
    assert notes == [f"not applied, their weights are stored unquantised: {scale}"]


def test_scales_of_activations_are_told_and_others_are_left() -> None:
    stored = {
        "a.weight": fp8(4, 4), "a.weight_scale": torch.ones(4, 1), "a.input_scale": torch.ones(1),
        "a.k_scale": torch.ones(1), "a.weight_scale_2": torch.ones(1), "b.scales": torch.ones(1),
        "a.weight_zp": torch.ones(1),
    }  # fmt: skip
    names, left, notes = sorted_out(stored)
    assert names == {"a.weight"} and left == ["a.weight_scale_2", "b.scales", "a.weight_zp"]
    assert notes == [
        "scales of activations are not used (rows that are rounded get scales of their own): "
        "a.input_scale",
        "scales of keys and values are not used (--kv-dtype fp8 makes its own): a.k_scale",
    ]
