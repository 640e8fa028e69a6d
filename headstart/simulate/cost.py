"""What a round costs, and the speed that this and an acceptance length come to.

Costs are measured (`engine/auto/served_costs.py`), or derived from sizes and memory bandwidth: for
one request at a time, a pass costs the weights that it reads. Of those only experts depend on its
number of rows: each row chooses its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.errors import ConfigError
from headstart.models.config import LayerKind, ModelConfig


class Costs(Protocol):
    def round_seconds(self, batch: int, drafts: int) -> float:
        """One verification of `batch` requests with `drafts` drafts each, and drafting them."""
        ...


@dataclass(frozen=True)
class CostTable:
    """Seconds of a trunk pass and of a draft step, where memory is what they wait for."""

    trunk: float
    draft: float
    # the same for reading all routed experts, and the share of them that one row chooses
    trunk_experts: float = 0.0
    draft_experts: float = 0.0
    chosen: float = 0.0

    def round_seconds(self, batch: int, drafts: int) -> float:
        """The batch must be small enough that arithmetic hides behind reading weights."""
        trunk = self.trunk + self.trunk_experts * self._read(batch * (drafts + 1))
        return trunk + drafts * (self.draft + self.draft_experts * self._read(batch))

    def _read(self, rows: int) -> float:
        """The share of experts that some row chooses, if rows choose independently."""
        return 1 - (1 - self.chosen) ** rows


def from_bandwidth(
    config: ModelConfig,
    *,
    bytes_per_weight: float,
    bandwidth: float,
    lm_head_bytes: float | None = None,
    draft_bytes: float | None = None,
    draft_tokens: int | None = None,
    head: ModelConfig | None = None,
) -> CostTable:
    """Costs from bytes read: `bandwidth` in bytes per second, `draft_tokens` of a draft vocabulary,
    `head` the sizes of its block where they are not the trunk's. A weight of the LM head, and of
    all that drafts, may have another number of bytes than one of the trunk's layers.

    K/V and activations are left out, and so are fixed overheads: right for short contexts.
    """
    if not (math.isfinite(bandwidth) and bandwidth > 0):
        raise ConfigError(f"the bandwidth is {bandwidth:g}; give bytes per second above 0.")
    seconds = bytes_per_weight / bandwidth
    drafting = (bytes_per_weight if draft_bytes is None else draft_bytes) / bandwidth
    lm_head_seconds = (bytes_per_weight if lm_head_bytes is None else lm_head_bytes) / bandwidth
    head = head or config
    lm_head = config.vocab * config.hidden
    drafted = (config.vocab if draft_tokens is None else draft_tokens) * config.hidden
    trunk = sum(layer_weights(config, kind) for kind in config.layers)
    draft = 2 * config.hidden**2 + layer_weights(head, head.head_layer) + drafted
    experts = sum(expert_weights(config, kind) for kind in config.layers)
    return CostTable(
        trunk * seconds + lm_head * lm_head_seconds,
        draft * drafting,
        experts * seconds,
        expert_weights(head, head.head_layer) * drafting,
        0.0 if config.moe is None else config.moe.top_k / config.moe.num_experts,
    )


def layer_weights(config: ModelConfig, kind: LayerKind) -> int:
    """Weights of a decoder layer that every row needs; norms and biases are too small to matter."""
    feed, matrices = 0, 2 + config.gated_mlp
    if kind.feed == "dense":
        feed = matrices * config.intermediate
    elif kind.feed == "moe":
        assert config.moe is not None
        feed = config.moe.num_experts + matrices * config.moe.shared_width + 2 * config.moe.latent
    streams = config.streams if kind.has_streams else None
    if streams is not None:  # both halves' shares
        outputs = streams.count * (2 + streams.count * (streams.kind == "balanced"))
        feed += 2 * streams.count * outputs
    return _mixer_weights(config, kind) + config.hidden * feed


def _mixer_weights(config: ModelConfig, kind: LayerKind) -> int:
    if kind.mixer == "latent":
        mla = config.mla
        assert mla is not None
        queries = config.num_heads * mla.qk_dim
        unfolded = config.num_heads * (mla.nope_dim + mla.v_dim)
        compressed = config.hidden * ((mla.q_rank or queries) + mla.entry)
        up = (mla.q_rank or 0) * queries + mla.kv_rank * unfolded
        index = mla.index if kind.index == "own" else None
        if index is not None:
            up += (mla.q_rank or 0) * index.heads * index.dim
            compressed += config.hidden * (index.kept + index.heads)
        outputs = config.num_heads * (mla.v_dim + mla.gate_dim)
        return compressed + up + outputs * config.hidden
    if kind.mixer == "compressed":
        return _compressed_weights(config, kind)
    if kind.mixer == "none":
        return 0
    if kind.mixer == "mamba":
        assert config.mamba is not None
        # what is convolved, the time steps, the output's gate, and the output
        columns = config.mamba.channels + config.mamba.v_heads + 2 * config.mamba.values
    elif kind.mixer == "delta":
        assert config.delta is not None
        # what is convolved, two gates of each head, the output's gate, and the output
        columns = config.delta.channels + 2 * config.delta.v_heads + 2 * config.delta.values
    else:
        shape = config.shape(kind)
        queries = shape.heads * (1 + config.gated_attention) + shape.kv_heads
        columns = queries * shape.dim + (shape.heads + shape.kv_heads) * shape.v_dim
    return config.hidden * columns


def _compressed_weights(config: ModelConfig, kind: LayerKind) -> int:
    own = config.compressed
    assert own is not None
    chooses = kind.index == "own"
    kept = own.kept(has_windows=kind.window_size > 0, chooses=chooses)
    outputs = own.groups * own.o_rank
    total = config.hidden * (own.q_rank + kept + outputs)
    total += config.num_heads * own.dim * (own.q_rank + own.o_rank)
    if chooses and own.index is not None:
        total += own.index.heads * (own.q_rank * own.index.dim + config.hidden)
    return total


def expert_weights(config: ModelConfig, kind: LayerKind) -> int:
    """Weights of all routed experts of a layer."""
    if kind.feed != "moe" or config.moe is None:
        return 0
    size = config.moe.latent or config.hidden
    return (2 + config.gated_mlp) * size * config.moe.width * config.moe.num_experts


@dataclass(frozen=True)
class Speed:
    """What K drafts per round bring."""

    drafts: int
    acceptance_length: float
    round_seconds: float
    speed_up: float  # against no drafts
    speed_up_interval: tuple[float, float] | None = None  # by the acceptance length's alone

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def predict(
    lengths: Sequence[float],
    costs: Costs,
    batch: int = 1,
    *,
    intervals: Sequence[tuple[float, float]] | None = None,
) -> list[Speed]:
    """The speed of every K, from the acceptance lengths by K (from 0) and their intervals."""
    plain = costs.round_seconds(batch, 0)
    result = []
    for drafts, length in enumerate(lengths):
        seconds = costs.round_seconds(batch, drafts)
        spread = None
        if intervals is not None:
            low, high = intervals[drafts]
            spread = (low * plain / seconds, high * plain / seconds)
        result.append(Speed(drafts, length, seconds, length * plain / seconds, spread))
    return result


def best(speeds: Sequence[Speed]) -> Speed:
    """The fastest; of equally fast ones the one that drafts least."""
    return max(speeds, key=lambda speed: (speed.speed_up, -speed.drafts))
