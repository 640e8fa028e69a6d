"""A head's parameters as tensors under our names: the inverse of `load_head`.

The table of names and the order of merged parts are loading's own, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headstart.models.config import ModelConfig
from headstart.models.loading import LAYER_PARTS, places_of


def split_parameters(
    parameters: Mapping[str, torch.Tensor], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Our name -> values, with merged q, k, v and gate, up taken apart.

    From a head's parameters by name, wherever they are kept.
    """
    return {
        name: value.detach()
        for parameter, whole in parameters.items()
        for name, value in _parts(parameter, whole, config)
    }


def _parts(
    parameter: str, whole: torch.Tensor, config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    _, module, role = parameter.split(".", 2)
    at = f"modules.{module}."
    if not role.startswith("block."):
        yield at + role, whole
        return
    theirs = LAYER_PARTS[role.removeprefix("block.")]
    for name, place in places_of(parameter, theirs, config):
        part = whole if place.stop < 0 else whole[place.start : place.stop]
        yield f"{at}block.{name}", part
