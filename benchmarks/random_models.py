"""Models of any shape with random weights, for programs that time and do not read."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from headstart.checkpoint.reader import Checkpoint
from headstart.families.registry import family
from headstart.models.build import LoadedModel
from headstart.models.config import ModelConfig
from headstart.models.loading import materialize
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.models.trunk import Trunk


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, max_len: int
) -> tuple[Trunk, MTPHead]:
    """A trunk and a MiMo head for it."""
    with torch.device("meta"):
        trunk = Trunk(config, 1, dtype)
        head = MTPHead(replace(config, num_layers=1), family("mimo").layout, 1)
    for module in (trunk, head):
        materialize(module, device, dtype)
        for parameter in module.parameters():
            parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    trunk.rotary = RotaryTable(config.rope, max_len, dtype).to(device)
    return trunk, head


def hand_made(trunk: Trunk, head: MTPHead | None) -> LoadedModel:
    """The same as if it had been loaded, for a backend; there is no checkpoint behind it."""
    embed = trunk.embed
    return LoadedModel(
        cast(Checkpoint, None), trunk.config, trunk, head, embed.dtype, embed.device,
        trunk.config.max_positions, (),
    )  # fmt: skip
