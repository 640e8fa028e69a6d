"""A head's parameters taken apart are what was put together."""

from __future__ import annotations

import pytest
import torch
from tiny_fixture import Tiny

from headstart.assembly.build import build
from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.heads.head import head_of
from headstart.models.config import model_config
from headstart.models.saving import split_parameters


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
