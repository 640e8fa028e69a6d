"""Fusing and splitting experts moves bytes and loses none."""

from __future__ import annotations

import pytest
import torch

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load
from headstart.errors import MissingTensor, ShapeMismatch
from headstart.heads.experts import (
    fuse_experts,
    has_fused_experts,
    split_experts,
    unstack_experts,
)

STEM = "modules.0.block.mlp.experts"
COUNT, WIDTH, HIDDEN = 3, 4, 6


def source(tensor: torch.Tensor) -> TensorSource:
    data = bytes(as_bytes(tensor))
    return TensorSource("F32", tuple(tensor.shape), lambda: (data,), is_copy=False)


def apart() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {
        f"{STEM}.{expert}.{kind}_proj.weight": torch.randn(shape, generator=generator)
        for expert in range(COUNT)
        for kind, shape in shapes.items()
    }


def sources(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSource]:
    return {name: source(tensor) for name, tensor in tensors.items()}


def test_gate_rows_precede_up_rows_expert_after_expert() -> None:
    tensors = apart()
    fused = fuse_experts(sources(tensors))
    rows = [
        torch.cat([tensors[f"{STEM}.{e}.gate_proj.weight"], tensors[f"{STEM}.{e}.up_proj.weight"]])
        for e in range(COUNT)
    ]
    assert torch.equal(load(fused[f"{STEM}.gate_up_proj"]), torch.stack(rows))
    downs = [tensors[f"{STEM}.{e}.down_proj.weight"] for e in range(COUNT)]
    assert torch.equal(load(fused[f"{STEM}.down_proj"]), torch.stack(downs))


def test_splitting_undoes_fusing() -> None:
    tensors = apart()
    back = split_experts(fuse_experts(sources(tensors)))
    assert set(back) == set(tensors)
    assert all(torch.equal(load(back[name]), tensors[name]) for name in tensors)


def test_experts_in_any_order_are_fused_by_number() -> None:
    tensors = dict(reversed(apart().items()))
    one, other = fuse_experts(sources(apart())), fuse_experts(sources(tensors))
    name = f"{STEM}.gate_up_proj"
    assert torch.equal(load(one[name]), load(other[name]))


def test_other_tensors_stay_as_they_are() -> None:
    gate = {"modules.0.block.mlp.gate.weight": source(torch.ones(COUNT, HIDDEN))}
    assert fuse_experts(gate) == gate
    assert split_experts(gate) == gate
    assert not has_fused_experts(gate)


@pytest.mark.parametrize("lost", ["1.up_proj", "0.down_proj", "1.gate_proj"])
def test_a_gap_between_experts_is_refused(lost: str) -> None:
    tensors = sources(apart())
    del tensors[f"{STEM}.{lost}.weight"]
    with pytest.raises(MissingTensor, match=lost.replace(".", r"\.")):
        fuse_experts(tensors)


def test_a_stack_of_empty_matrices_is_refused_before_it_is_walked() -> None:
    empty = TensorSource("F32", (2**40, 0, 1), lambda: (), is_copy=True)
    with pytest.raises(ShapeMismatch, match="none of them empty"):
        unstack_experts({f"{STEM}.gate_proj.weight": empty})
