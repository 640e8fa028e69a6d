"""Drafting with rounded weights changes what is accepted at most, never the text."""

from __future__ import annotations

import pytest
import torch
from engine_runs import assert_head_is_alive, ids_of
from test_engine_kernels import PROMPTS, model, settings, start
from tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.errors import ConfigError
from headstart.models.linear import Linear


def test_the_text_is_that_of_unrounded_weights(tiny: Tiny) -> None:
    folder = model(tiny)
    wanted = ids_of(start(folder, "off", speculate=0).generate(PROMPTS[:2], settings()[:2]))
    rounded = start(folder, "on", draft_weights="int8")
    found = rounded.generate(PROMPTS[:2], settings()[:2])
    assert ids_of(found) == wanted
    assert_head_is_alive(found)
    drafting = rounded.loop.seating.graphs.model
    assert drafting.draft_lm_head.rounded.weight.dtype == torch.int8
    assert drafting.head.module(1).fuse.rounded.weight.dtype == torch.int8
    kept = [m for m in rounded.built.trunk.modules() if isinstance(m, Linear)]
    assert kept and all(layer.rounded is None for layer in kept), "only what drafts is rounded"


def test_the_plain_path_does_not_round_drafts(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="only the kernels of the GPU path have it"):
        start(model(tiny), "off", draft_weights="int8")
