"""The parts of a head's parameters by their stored names, as files hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from headstart.models.config import ModelConfig
from headstart.models.loading import head_targets


def parameter_parts(
    parameters: Mapping[str, torch.Tensor], config: ModelConfig, stored: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Our name -> the part of a head's parameter that it fills, as the parameter holds it.

    Where a part may be stored in several ways, such as experts one by one or fused, `stored` names
    tell which.
    """
    return {
        name: target.of(parameters[target.parameter]).detach()
        for name, target in head_targets(parameters, config, stored)
    }


def split_parameters(
    parameters: Mapping[str, torch.Tensor], config: ModelConfig, stored: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Our name -> that part as files store it; rows in an order of their own are copied."""
    result = parameter_parts(parameters, config, stored)
    for name, target in head_targets(parameters, config, stored):
        if target.order:
            rows = torch.tensor(target.order, device=result[name].device).argsort()
            result[name] = result[name][rows]
    return result
