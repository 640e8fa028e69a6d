"""Sizes of a Mamba-2 layer (Nemotron-H): groups are its key heads, heads its value heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadConfig
from headstart.families.dims import positive_ints
from headstart.models.delta_config import RecurrentConfig

_SIZES = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")


@dataclass(frozen=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    has_conv_bias: bool

    @property
    def group(self) -> int:
        """Values that are normed together."""
        return self.values // self.k_heads


def mamba_config(raw: Mapping[str, Any]) -> MambaConfig:
    """The Mamba layers of a config, or what is wrong with it."""
    sizes = positive_ints(raw, _SIZES)
    if sizes is None or sizes[1] % sizes[0]:
        found = ", ".join(repr(raw.get(name)) for name in _SIZES)
        raise BadConfig(
            f"{', '.join(_SIZES)} are {found}; expected whole numbers above 0, and as many heads "
            "as groups or a multiple. Take the config.json of the model's release."
        )
    groups, heads, state, head_dim, kernel = sizes
    return MambaConfig(
        k_heads=groups, v_heads=heads, k_dim=state, v_dim=head_dim, kernel=kernel,
        has_conv_bias=bool(raw.get("use_conv_bias", True)),
    )  # fmt: skip
