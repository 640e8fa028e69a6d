"""A head's parameters taken apart are what was put together."""

from __future__ import annotations

import pytest
import torch
from support.tiny_fixture import Tiny

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.heads.head import head_of
from headstart.models.build import build
from headstart.models.config_reader import model_config
from headstart.models.head_parts import split_parameters


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_saved_tensors_are_the_stored_ones(tiny: Tiny, dtype: str) -> None:
    checkpoint = Checkpoint.open(tiny("mimo", dtype=dtype))
    built = build(checkpoint, device="cpu", dtype="float32")
    stored = head_of(checkpoint)
    assert built.head is not None
    config = model_config(Config(dict(stored.config)).fields)
    found = split_parameters(dict(built.head.named_parameters()), config)
    assert set(found) == set(stored.tensors)
    for name, source in stored.tensors.items():
        assert torch.equal(found[name], load(source).float()), name
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
def test_experts_are_saved_in_the_way_they_were_stored(tiny: Tiny, fused: bool) -> None:
    checkpoint = Checkpoint.open(tiny("glm4_moe", dtype="F32", fused_experts=fused))
    built = build(checkpoint, device="cpu", dtype="float32")
    stored = head_of(checkpoint)
    assert built.head is not None
    parameters = dict(built.head.named_parameters())
    found = split_parameters(parameters, built.head.config, stored.tensors)
    kept = {n for n in stored.tensors if n.split(".")[2] in ("embed_tokens", "lm_head")}
    frozen = "modules.0.block.mlp.gate.e_score_correction_bias"
    assert set(found) == set(stored.tensors) - kept - {frozen}
    for name, value in found.items():
        assert torch.equal(value, load(stored.tensors[name])), name
