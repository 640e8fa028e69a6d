"""A head as it is stored, into modules beside a trunk that is already there."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from headstart.checkpoint.config import Config
from headstart.errors import ConfigError
from headstart.heads.head import Head, dequantize
from headstart.models.config import ModelConfig, model_config
from headstart.models.loading import load_head, materialize
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable

Layout = Literal["own", "vllm", "sglang"]


def load_stored_head(
    head: Head,
    trunk: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    run_as: Layout,
    max_len: int,
) -> MTPHead:
    """The head on the device, run as its family or as an engine does; it must fit the trunk."""
    head = dequantize(head)
    config = _as_stored(model_config(Config(dict(head.config)).fields), head)
    if (config.hidden, config.vocab) != (trunk.hidden, trunk.vocab):
        raise ConfigError(
            f"the head is for hidden {config.hidden} and {config.vocab} tokens, the model has "
            f"{trunk.hidden} and {trunk.vocab}. Take the head of this model."
        )
    if replace(config.rope, dim=trunk.rope.dim) != trunk.rope:
        raise ConfigError(
            f"the head rotates positions by {config.rope}, the model by {trunk.rope}. Take the "
            "head of this model, or correct the head's config."
        )
    layout = head.family.layout
    if run_as != "own":
        layout = layout.as_(run_as)
    count, tensors = head.num_modules, head.tensors
    if layout.topology == "recursive" and head.family.layout.topology != "recursive":
        # the way of an engine that runs the first module again and again
        count, tensors = 1, {n: t for n, t in tensors.items() if n.startswith("modules.0.")}
    with torch.device("meta"):
        module = MTPHead(config, layout, count)
    materialize(module, device, dtype)
    load_head(module, tensors, config)
    rope = config.shape(config.head_layer).rope
    if layout.rotates_halves:
        rope = replace(rope, is_interleaved=False)
    if rope != trunk.rope:  # other head_dim, or other pairs
        module.rotate_by(RotaryTable(rope, max_len, dtype).to(device))
    return module


def _as_stored(config: ModelConfig, head: Head) -> ModelConfig:
    """Some heads have a dense block where the family's usual one has experts: tensors decide."""
    if "modules.0.block.mlp.gate_proj.weight" not in head.tensors:
        return config
    return replace(config, head_layer=replace(config.head_layer, feed="dense"))
