"""Sizes of compressed attention (DeepSeek-V4): near tokens by themselves, far ones by windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadConfig
from headstart.families.dims import at, positive_ints
from headstart.models.mla_config import IndexConfig
from headstart.models.rope import RopeConfig, rope_config

_SIZES = ("q_lora_rank", "head_dim", "qk_rope_head_dim", "sliding_window", "o_groups",
          "o_lora_rank")  # fmt: skip
_INDEX = ("index_n_heads", "index_head_dim", "index_topk")


@dataclass(frozen=True, kw_only=True)
class CompressedConfig:
    q_rank: int  # of the queries' latent
    dim: int  # of a head, and of the one entry that is key and value of a token
    near: int  # how many tokens a row sees by themselves, itself included
    groups: int  # of heads, each with an output projection of its own
    o_rank: int  # that a group is projected to
    eps: float
    rope: RopeConfig  # of layers that see near tokens only
    far_rope: RopeConfig  # of layers that see windows as well
    index: IndexConfig | None  # where rows see a choice of windows

    def kept(self, *, has_windows: bool, chooses: bool) -> int:
        """Numbers that are kept of a token: its entry, and what those of windows are made from."""
        if not has_windows:
            return self.dim
        if not chooses:
            return 3 * self.dim
        assert self.index is not None
        return 5 * self.dim + 4 * self.index.dim


def compressed_config(raw: Mapping[str, Any], *, has_index: bool) -> CompressedConfig:
    """The compressed attention of a config, or what is wrong with it."""
    names = (*_SIZES, *(_INDEX if has_index else ()))
    sizes = positive_ints(raw, names)
    heads = int(raw.get("num_attention_heads") or 0)
    if sizes is None or sizes[2] % 2 or sizes[2] > sizes[1] or heads % sizes[4]:
        given = ", ".join(f"{name} {raw.get(name)!r}" for name in names)
        raise BadConfig(
            f"the config gives {given} and {heads} heads; expected whole numbers above 0, an even "
            "rotated size of at most head_dim, and heads that groups share evenly. Take the "
            "config.json of the model's release."
        )
    q_rank, dim, rope_dim, near, groups, o_rank, *index = sizes
    if index and index[1] < rope_dim:
        raise BadConfig(
            f"index_head_dim is {index[1]} and qk_rope_head_dim {rope_dim}; expected index heads "
            "of at least the rotated size. Take the config.json of the model's release."
        )
    return CompressedConfig(
        q_rank=q_rank,
        dim=dim,
        near=near,
        groups=groups,
        o_rank=o_rank,
        eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw, "main", rope_dim),
        far_rope=_rope(raw, "compress", rope_dim),
        index=IndexConfig(
            heads=index[0], dim=index[1], top_k=index[2], is_interleaved=True, rotates_last=True
        )
        if index
        else None,
    )


def _rope(raw: Mapping[str, Any], label: str, dim: int) -> RopeConfig:
    """Positions are stretched where windows are seen, and there with a theta of their own.

    YaRN's temperature is left out of both.
    """
    own = at(raw, f"rope_parameters.{label}")
    if own is None:
        is_far = label == "compress"
        scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        own = {
            **(scaling if is_far else {}),
            "rope_theta": raw["compress_rope_theta" if is_far else "rope_theta"],
        }
    fields = {**own, "attention_factor": 1.0, "partial_rotary_factor": None}
    positions = raw.get("max_position_embeddings")
    given = {"rope_parameters": fields, "max_position_embeddings": positions}
    return rope_config(given, dim, is_interleaved=True)
