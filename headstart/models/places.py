"""Where published tensors lie in our parameters: q, k, v and gate, up are merged, experts stacked.

Loading and saving both read this, so the two cannot drift apart. Where releases spell a part in
several ways, what is stored tells which one is meant.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from headstart.families.experts import split_name
from headstart.models.config import LayerKind, ModelConfig


@dataclass(frozen=True)
class Place:
    """Where one published tensor goes: rows [start, stop) of a parameter or of an expert."""

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


def _attention(part: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{p}_proj.{part}" for p in "qkv")


def _gate_up(module: str, part: str) -> tuple[str, ...]:
    return (f"{module}.gate_proj.{part}", f"{module}.up_proj.{part}")


_SHARED = ("mlp.shared_experts", "mlp.shared_expert", "share_expert")
# our parameter -> the published parts that follow one another in its rows, in every spelling
LAYER_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention_norm.weight": (("input_layernorm.weight",),),
    "attention.qkv.weight": (_attention("weight"),),
    "attention.qkv.bias": (_attention("bias"),),
    "attention.o.weight": (("self_attn.o_proj.weight",),),
    "attention.o.bias": (("self_attn.o_proj.bias",),),
    "attention.q_norm.weight": (("self_attn.q_norm.weight",),),
    "attention.k_norm.weight": (("self_attn.k_norm.weight",),),
    "attention.head_gate.weight": (("self_attn.g_proj.weight",),),
    "attention.sinks": (("self_attn.attention_sink_bias",),),
    # with a latent of the queries, and without
    "attention.compress.weight": (
        ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ),
    "attention.q_latent_norm.weight": (("self_attn.q_a_layernorm.weight",),),
    "attention.q_up.weight": (("self_attn.q_b_proj.weight",),),
    "attention.kv_latent_norm.weight": (("self_attn.kv_a_layernorm.weight",),),
    "attention.kv_up": (("self_attn.kv_b_proj.weight",),),
    "attention.indexer.q_up.weight": (("self_attn.indexer.wq_b.weight",),),
    "attention.indexer.k.weight": (("self_attn.indexer.wk.weight",),),
    "attention.indexer.k_norm_weight": (("self_attn.indexer.k_norm.weight",),),
    "attention.indexer.k_norm_bias": (("self_attn.indexer.k_norm.bias",),),
    "attention.indexer.weights.weight": (("self_attn.indexer.weights_proj.weight",),),
    # Qwen3.5's spelling, then Qwen3-Next's, whose rows are sorted by key head
    "attention.inputs.weight": (
        tuple(f"linear_attn.in_proj_{p}.weight" for p in ("qkv", "z", "b", "a")),
        tuple(f"linear_attn.in_proj_{p}.weight" for p in ("qkvz", "ba")),
    ),
    "attention.conv": (("linear_attn.conv1d.weight",),),
    "attention.a_log": (("linear_attn.A_log",),),
    "attention.dt_bias": (("linear_attn.dt_bias",),),
    "attention.norm": (("linear_attn.norm.weight",),),
    "attention.out.weight": (("linear_attn.out_proj.weight",),),
    "mlp_norm.weight": (("post_attention_layernorm.weight",), ("pre_mlp_layernorm.weight",)),
    "mlp.gate_up.weight": (_gate_up("mlp", "weight"),),
    "mlp.gate_up.bias": (_gate_up("mlp", "bias"),),
    "mlp.down.weight": (("mlp.down_proj.weight",),),
    "mlp.down.bias": (("mlp.down_proj.bias",),),
    "mlp.router.weight": (("mlp.gate.weight",), ("moe.gate.weight",)),
    "mlp.router.correction": (
        ("mlp.gate.e_score_correction_bias",),
        ("mlp.moe_statics.e_score_correction_bias",),
        ("moe.router_bias",),
    ),
    "mlp.shared.gate_up.weight": tuple(_gate_up(name, "weight") for name in _SHARED),
    "mlp.shared.down.weight": tuple((f"{name}.down_proj.weight",) for name in _SHARED),
    "mlp.shared_gate.weight": (("mlp.shared_expert_gate.weight",),),
}
# our stacked parameter -> the published one of all experts, and the projections that follow one
# another where each expert is stored by itself
_STACKED = {
    "mlp.experts.gate_up.weight": ("mlp.experts.gate_up_proj", ("gate", "up")),
    "mlp.experts.down.weight": ("mlp.experts.down_proj", ("down",)),
}


def layer_places(
    ours: str, at: str, role: str, config: ModelConfig, kind: LayerKind, stored: Collection[str]
) -> list[tuple[str, Place]]:
    """Published names and places of parameter `ours`, which is `role` in a layer stored below `at`.

    Nothing for a role that layers do not have.
    """
    if role in _STACKED:
        fused, projections = _STACKED[role]
        if at + fused in stored:
            return [(at + fused, Place(ours))]
        stacked = [f"{at}moe.{projection}_proj.weight" for projection in projections]
        if stacked[0] in stored:  # all experts of a projection at once
            return _in_stacks(ours, stacked, config)
        return _by_expert(ours, at + fused, projections, config)
    spellings = LAYER_PARTS.get(role)
    if spellings is None:
        return []
    usual = spellings[0]
    if role == "attention.compress.weight" and config.mla is not None and not config.mla.q_rank:
        usual = spellings[1]
    theirs = next((names for names in spellings if at + names[0] in stored), usual)
    if len(theirs) == 1:
        return [(at + theirs[0], Place(ours))]
    if role == "attention.inputs.weight" and len(theirs) == 2:
        return _by_key_head(ours, at, theirs, config)
    result, start = [], 0
    for name, size in zip(theirs, _sizes(role, config, kind), strict=True):
        result.append((at + name, Place(ours, start, start + size)))
        start += size
    return result


def _sizes(role: str, config: ModelConfig, kind: LayerKind) -> list[int]:
    """Rows of the parts of a merged matrix."""
    if role == "attention.inputs.weight":
        delta = config.delta
        assert delta is not None
        return [delta.channels, delta.values, delta.v_heads, delta.v_heads]
    if role == "attention.compress.weight":
        mla = config.mla
        assert mla is not None
        return [mla.q_rank or config.num_heads * mla.qk_dim, mla.entry]
    if role.startswith("attention."):
        shape = config.shape(kind)
        q = shape.heads * shape.dim * (1 + config.gated_attention)
        return [q, shape.kv_heads * shape.dim, shape.kv_heads * shape.v_dim]
    if role.startswith("mlp.shared."):
        assert config.moe is not None
        return [config.moe.shared_width] * 2
    return [config.intermediate] * 2


def _in_stacks(ours: str, names: list[str], config: ModelConfig) -> list[tuple[str, Place]]:
    assert config.moe is not None
    if len(names) == 1:
        return [(names[0], Place(ours))]
    width = config.moe.width
    return [(name, Place(ours, i * width, (i + 1) * width)) for i, name in enumerate(names)]


def _by_expert(
    ours: str, fused: str, projections: tuple[str, ...], config: ModelConfig
) -> list[tuple[str, Place]]:
    assert config.moe is not None
    width, result = config.moe.width, []
    for expert in range(config.moe.num_experts):
        for number, projection in enumerate(projections):
            cut = (number * width, (number + 1) * width) if len(projections) > 1 else (0, -1)
            result.append((split_name(fused, expert, projection), Place(ours, *cut, expert)))
    return result


def _by_key_head(
    ours: str, at: str, theirs: tuple[str, ...], config: ModelConfig
) -> list[tuple[str, Place]]:
    """Rows that are stored key head by key head, each with all that belongs to it."""
    delta = config.delta
    assert delta is not None
    group = delta.v_heads // delta.k_heads
    values = group * delta.v_dim
    sizes = ([delta.k_dim, delta.k_dim, values, values], [group, group])
    result, start = [], 0
    for name, each in zip(theirs, sizes, strict=True):
        rows = torch.arange(delta.k_heads * sum(each)).view(delta.k_heads, -1)
        order = torch.cat([part.flatten() for part in torch.split(rows, each, dim=1)])
        stop = start + len(order)
        result.append((at + name, Place(ours, start, stop, order=tuple(order.tolist()))))
        start = stop
    return result
