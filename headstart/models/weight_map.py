"""Which rows of which parameter a published tensor fills: q, k, v and gate, up are merged, experts
stacked.

Loading and saving both read this, so the two cannot drift apart. The names are in
`families/parameters.py` and in the family's `Runtime`; what is stored tells which of two is meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count as count_from

import torch

from headstart.errors import BadConfig, ShapeMismatch
from headstart.families.experts import fused_slot
from headstart.families.parameters import USUAL
from headstart.families.registry import runtimes
from headstart.models.config import LayerKind, ModelConfig

_FUSED_QKV = "self_attn.qkv_proj.weight"


@dataclass(frozen=True)
class Target:
    """What one published tensor fills: rows [start, stop) of a parameter or of an expert."""

    parameter: str
    start: int = 0
    stop: int = -1  # below 0: the whole
    expert: int = -1  # below 0: not stacked, or all experts at once
    order: tuple[int, ...] = ()  # which published row comes where, if not as published

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of the parameter's value."""
        part = whole if self.expert < 0 else whole[self.expert]
        if self.stop < 0:
            return part
        return part.narrow(int(part.dim() == 3), self.start, self.stop - self.start)


Targets = list[tuple[str, Target]]  # by published name


def layer_targets(
    ours: str, at: str, role: str, config: ModelConfig, kind: LayerKind, stored: Collection[str]
) -> Targets:
    """Published tensors of parameter `ours`, which is `role` in a layer stored below `at`.

    Nothing for a role that layers do not have.
    """
    names = _published(role, at, config, stored)
    if not names:
        return []
    if role == "attention.qkv.weight" and config.qkv_ranks and at + _FUSED_QKV in stored:
        return [(at + _FUSED_QKV, Target(ours, order=_by_rank(_sizes(role, config, kind), config)))]
    if "{expert}" in names[0]:
        fused = fused_slot(names[0].format(expert=0))
        if fused is None or at + fused.name not in stored:
            return _by_expert(ours, [at + name for name in names], config)
        names = (fused.name,)
    if "{shard}" in names[0]:
        return _by_shard(ours, at + names[0], config, stored)
    if len(names) == 1:
        return [(at + names[0], Target(ours))]
    if role == "attention.inputs.weight" and len(names) == 2:
        return _by_key_head(ours, [at + name for name in names], config)
    result, start = [], 0
    for name, size in zip(names, _sizes(role, config, kind), strict=True):
        result.append((at + name, Target(ours, start, start + size)))
        start += size
    return result


def _published(role: str, at: str, config: ModelConfig, stored: Collection[str]) -> tuple[str, ...]:
    """The family's own names, unless the usual ones are stored instead."""
    usual = USUAL.get(role, ())
    if role == "attention.compress.weight" and config.mla is not None and not config.mla.q_rank:
        usual = ("self_attn.q_proj.weight", *usual[1:])
    own = parameters_of(config, in_head=at.startswith("modules.")).get(role)
    if own is None or (usual and at + own[0] not in stored and at + usual[0] in stored):
        return usual
    return own


def parameters_of(config: ModelConfig, *, in_head: bool = False) -> Mapping[str, tuple[str, ...]]:
    """Published tensors of parameters that the family does not call as usual."""
    runtime = runtimes().get(config.model_type)
    if runtime is None:
        return {}
    return (runtime.head_parameters if in_head else {}) or runtime.parameters


def _sizes(role: str, config: ModelConfig, kind: LayerKind) -> list[int]:
    """Rows of the parts of a merged matrix."""
    if role == "attention.inputs.weight":
        delta = config.delta
        assert delta is not None
        if delta.by_channel:  # q, k, v, what decays and gates come from, and b
            size = delta.v_dim if delta.is_low_rank else delta.values
            return [delta.values] * 3 + [size] * 2 + [delta.v_heads]
        return [delta.channels, delta.values, delta.v_heads, delta.v_heads]
    if role.endswith("windows.kv.weight"):
        own = config.compressed
        assert own is not None
        index = own.index if ".indexer." in role else None
        size = own.dim if index is None else index.dim
        return [size * (1 + (kind.index == "own"))] * 2
    if role == "attention.compress.weight" and config.compressed is not None:
        return [config.compressed.q_rank, config.compressed.dim]
    if role == "attention.compress.weight":
        mla = config.mla
        assert mla is not None
        return [mla.q_rank or config.num_heads * mla.qk_dim, mla.entry]
    if role.startswith("attention."):
        shape = config.shape(kind)
        q = shape.heads * shape.dim * (1 + config.gated_attention)
        return [q, shape.kv_heads * shape.dim, shape.kv_heads * shape.v_dim]
    if role.startswith(("mlp.shared.", "mlp.experts.")):
        assert config.moe is not None
        is_shared = role.startswith("mlp.shared.")
        return [config.moe.shared_width if is_shared else config.moe.width] * 2
    return [config.intermediate] * 2


def _by_expert(ours: str, names: list[str], config: ModelConfig) -> Targets:
    assert config.moe is not None
    width, result = config.moe.width, []
    for expert in range(config.moe.num_experts):
        for number, name in enumerate(names):
            cut = (number * width, (number + 1) * width) if len(names) > 1 else (0, -1)
            result.append((name.format(expert=expert), Target(ours, *cut, expert)))
    return result


def _by_rank(sizes: list[int], config: ModelConfig) -> tuple[int, ...]:
    """Where q, k and v lie that are stored rank after rank, each with its share of all three."""
    ranks = config.qkv_ranks
    if any(size % ranks for size in sizes):
        raise BadConfig(
            f"a fused qkv_proj is stored for {ranks} ranks, and q, k and v have {sizes} rows, "
            "which cannot be shared out evenly. Take the config.json of the model's release."
        )
    rows = torch.arange(sum(sizes)).view(ranks, -1)
    shares = torch.split(rows, [size // ranks for size in sizes], dim=1)
    return tuple(torch.cat([share.flatten() for share in shares]).tolist())


def _by_shard(ours: str, name: str, config: ModelConfig, stored: Collection[str]) -> Targets:
    """A table that is stored in parts of equal size, as many as there are."""
    assert config.ngrams is not None
    found = next(n for n in count_from(0) if name.format(shard=n) not in stored)
    count, rows = max(1, found), config.ngrams.rows
    if rows % count:
        raise ShapeMismatch(
            f"{name.format(shard='*')} is stored in {count} parts, and its {rows} rows cannot be "
            "shared out evenly. Part of it may be missing: take the files of the model's release."
        )
    size = rows // count
    return [(name.format(shard=n), Target(ours, n * size, (n + 1) * size)) for n in range(count)]


def _by_key_head(ours: str, names: list[str], config: ModelConfig) -> Targets:
    """Rows that are stored key head by key head, each with all that belongs to it."""
    delta = config.delta
    assert delta is not None
    group = delta.v_heads // delta.k_heads
    values = group * delta.v_dim
    sizes = ([delta.k_dim, delta.k_dim, values, values], [group, group])
    result, start = [], 0
    for name, each in zip(names, sizes, strict=True):
        rows = torch.arange(delta.k_heads * sum(each)).view(delta.k_heads, -1)
        order = torch.cat([part.flatten() for part in torch.split(rows, each, dim=1)])
        stop = start + len(order)
        result.append((name, Target(ours, start, stop, order=tuple(order.tolist()))))
        start = stop
    return result
