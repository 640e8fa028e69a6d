"""Sizes of latent attention (DeepSeek-V3 and its relatives)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.dims import positive_ints

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
# of the norms of both latents and of index keys, whatever the layers' norms have
LATENT_EPS = 1e-6
# Of keys and values that a GPU unfolds latents to at a time.
MOST_UNFOLDED = 1 << 28


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    heads: int
    dim: int
    top_k: int  # entries that a row sees
    is_interleaved: bool  # rotated pairs are neighbours
    rotates_last: bool = False  # the last numbers of a head, not its first
    pool: int | None = None  # tokens whose keys are one, where rows choose whole pools
    has_gates: bool = False  # whether what a token counts in its pool is kept beside its key

    @property
    def kept(self) -> int:
        """Numbers that are kept of a token."""
        return self.dim * (1 + self.has_gates)


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    q_rank: int | None  # of the queries' latent; None where they are projected at once
    kv_rank: int
    nope_dim: int  # of a head's query and key: the part without positions
    rope_dim: int  # the part that is rotated; its key is one for all heads
    v_dim: int
    scale: float  # of scores
    eps: float = LATENT_EPS  # of the norms of both latents
    is_gated: bool = False  # a sigmoid of the row scales what each head gives
    gate_dim: int = 0  # gates of a head: one, or one for each number that it gives
    has_sinks: bool = False  # a score per head that takes part in soft-max and gives nothing
    index: IndexConfig | None = None  # where rows see a choice of entries only

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def entry(self) -> int:
        """Numbers that are kept of a token: its latent and its rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def few_rows(self) -> int:
        """Up to so many rows of a text it costs less to compare latents than to unfold them.

        Unfolding costs kv_rank * (nope + v) per entry and head, and saves the difference between
        2 * kv_rank and nope + v per entry, head and row.
        """
        unfolded = self.nope_dim + self.v_dim
        saved = 2 * self.kv_rank - unfolded
        return self.kv_rank * unfolded // saved if saved > 0 else 0


def mla_config(
    raw: Mapping[str, Any],
    parameters: Collection[str] = (),
    *,
    has_index: bool = False,
    rotates: bool = True,
) -> MlaConfig:
    """The latent attention of a config, or what is wrong with it.

    `parameters` are ours of a layer that has it.
    """
    q_rank = raw.get("q_lora_rank")
    sizes = positive_ints(raw, _SIZES if q_rank is None else (*_SIZES, "q_lora_rank"))
    rope_dim = raw.get("qk_rope_head_dim")
    if not rotates and rope_dim != 0:
        raise UnsupportedFamily(
            f"qk_rope_head_dim is {rope_dim!r}; the engine computes {raw.get('model_type')} "
            "without positions in attention, as its published class does."
        )
    if sizes is None or type(rope_dim) is not int or rope_dim % 2 or rope_dim < rotates:
        raise BadConfig(
            f"{_listed(raw, (*_SIZES, 'qk_rope_head_dim'))} and q_lora_rank is {q_rank!r}; "
            "expected whole numbers above 0, the rotated size an even one. Take the config.json of "
            "the model's release."
        )
    if raw.get("attention_bias"):
        raise UnsupportedFamily(
            "attention_bias is true; the engine computes latent attention without biases, as all "
            "its releases are."
        )
    kv_rank, nope_dim, v_dim = sizes[:3]
    is_gated = "attention.gate.weight" in parameters
    is_pooled = "attention.indexer.pool_gate" in parameters
    return MlaConfig(
        q_rank=q_rank,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
        scale=_scale(raw, nope_dim + rope_dim),
        eps=float(raw.get("latent_norm_eps") or LATENT_EPS),
        is_gated=is_gated,
        gate_dim=0 if not is_gated else 1 if raw.get("gates_heads") else v_dim,
        has_sinks="attention.sinks" in parameters,
        index=_index(raw, rope_dim, is_pooled=is_pooled) if has_index else None,
    )


def _index(raw: Mapping[str, Any], rope_dim: int, *, is_pooled: bool) -> IndexConfig:
    names = ("index_n_heads", "index_head_dim", "index_topk")
    sizes = positive_ints(raw, (*names, "q_lora_rank"))
    if sizes is None or sizes[1] < rope_dim:
        raise BadConfig(
            f"{_listed(raw, names)} and q_lora_rank is {raw.get('q_lora_rank')!r}; expected whole "
            f"numbers above 0, and index heads of at least the {rope_dim} numbers that are "
            "rotated. Take the config.json of the release."
        )
    heads, dim, top_k, _ = sizes
    pool = raw.get("index_kpool") if is_pooled else None
    if is_pooled and (type(pool) is not int or pool < 1 or top_k % pool):
        raise BadConfig(
            f"index_kpool is {pool!r} and index_topk {top_k}; expected whole numbers above 0, the "
            "second a multiple of the first. Take the config.json of the release."
        )
    return IndexConfig(
        heads=heads,
        dim=dim,
        top_k=top_k,
        is_interleaved=bool(raw.get("indexer_rope_interleave")),
        rotates_last=bool(raw.get("indexer_rotates_last")),
        pool=pool,
        has_gates=is_pooled,
    )


def mean_index(raw: Mapping[str, Any], rotated: int) -> IndexConfig:
    """The indexer of grouped attention, over means of keys."""
    names = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    sizes = positive_ints(raw, names)
    if sizes is None or sizes[2] % sizes[3] or sizes[1] < rotated or raw["indexer_kv_heads"] != 1:
        raise BadConfig(
            f"{_listed(raw, (*names, 'indexer_kv_heads'))}; expected whole numbers above 0, a "
            f"budget that is a multiple of the ratio, heads of at least the {rotated} numbers that "
            "are rotated, and 1 key head. Take the config.json of the release."
        )
    heads, dim, top_k, pool = sizes
    return IndexConfig(heads=heads, dim=dim, top_k=top_k, is_interleaved=False, pool=pool)


def _listed(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return f"{', '.join(names)} are {', '.join(repr(raw.get(name)) for name in names)}"


def _scale(raw: Mapping[str, Any], dim: int) -> float:
    """Where positions are stretched, scores are scaled by `mscale_all_dim` a second time."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    weight, factor = rope.get("mscale_all_dim"), float(rope.get("factor") or 1.0)
    scale = 1.0 / math.sqrt(dim)
    if kind == "default" or not weight or factor <= 1:
        return scale
    return scale * (0.1 * float(weight) * math.log(factor) + 1.0) ** 2
