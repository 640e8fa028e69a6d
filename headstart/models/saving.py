"""A head's parameters as tensors under our names: the inverse of `load_head`.

What published tensors fill is loading's own, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from headstart.models.config import ModelConfig
from headstart.models.loading import head_targets


def split_parameters(
    parameters: Mapping[str, torch.Tensor], config: ModelConfig, stored: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Our name -> values, with merged q, k, v and gate, up taken apart.

    From a head's parameters by name, wherever they are kept. Where a part may be stored in several
    ways, such as experts one by one or fused, `stored` names tell which.
    """
    return {
        name: target.of(parameters[target.parameter]).detach()
        for name, target in head_targets(parameters, config, stored)
    }
