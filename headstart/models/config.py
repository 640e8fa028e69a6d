"""Sizes and options of a model, from its published config.

One frozen dataclass. What configs of a family leave out or call differently is in its `Runtime`;
nothing here knows a family. What a model asks for and is not computed is refused by name: a silent
difference would only show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from headstart.errors import UnsupportedFamily, some
from headstart.families.base import Family, HeadLayout
from headstart.families.dims import number
from headstart.families.parameters import held_by
from headstart.families.registry import PLAIN_TRUNKS, family_of_trunk, runtimes
from headstart.families.runtime import Runtime
from headstart.models.attention_config import (
    AttentionShape,
    size,
    sliding_shape,
    windows_by_layer,
)
from headstart.models.compressed_config import CompressedConfig, compressed_config
from headstart.models.delta_config import DeltaConfig, RecurrentConfig, delta_config
from headstart.models.layer_kinds import (
    BY_TOKEN,
    DELTA,
    KIMI,
    MAMBA,
    NGRAMS,
    ROUTER,
    UNGATED,
    LayerKind,
    has_layers_with,
    kind_of,
    limited,
    parameters_by_layer,
    windowed,
    with_shared_indexers,
)
from headstart.models.mamba_config import MambaConfig, mamba_config
from headstart.models.mla_config import IndexConfig, MlaConfig, mean_index, mla_config
from headstart.models.moe_config import MoeConfig, moe_config
from headstart.models.ngram_embedding import NgramConfig, ngram_config
from headstart.models.rope import NO_ROTATION, RopeConfig, rope_config
from headstart.models.streams import StreamConfig, stream_config

__all__ = ["LayerKind", "ModelConfig", "model_config"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder; sizes hold for all layers, their kinds may differ."""

    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    vocab: int
    eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_tied: bool
    max_positions: int
    windows: tuple[int | None, ...]  # per layer: how many tokens back it sees, None for all
    layers: tuple[LayerKind, ...]
    head_layer: LayerKind  # what the block of a head is
    moe: MoeConfig | None
    delta: DeltaConfig | None  # of the layers whose mixer it is
    mamba: MambaConfig | None
    mla: MlaConfig | None  # of latent attention
    compressed: CompressedConfig | None  # of layers that see far tokens as entries of windows
    index: IndexConfig | None  # of layers with K/V heads that see a choice of tokens
    sliding: AttentionShape | None  # of layers that see a window, where they have their own
    v_scale: float  # of all values
    gated_attention: bool  # whether a sigmoid of the row scales what attention gives
    head_gate: bool  # whether a sigmoid of the row scales what each head gives
    gated_mlp: bool  # silu of a gate times the rest; else the square of what is above 0
    streams: StreamConfig | None  # where there are several residual ones
    ngrams: NgramConfig | None  # of the layer that has an embedding of several tokens
    centred_norms: bool  # whether a norm's weight is 1 more than what is stored
    head_rope: RopeConfig | None  # of a head that rotates otherwise than the trunk's layers
    qkv_ranks: int  # for which a fused q, k, v is stored; 0 where none is read

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """What recurrent layers keep; a model has one kind of them."""
        return self.delta or self.mamba

    @property
    def num_recurrent(self) -> int:
        """Layers that keep a state instead of keys and values."""
        return sum(kind.is_recurrent for kind in self.layers)

    def kept(
        self, kind: LayerKind, *, index_apart: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what a layer keeps of a token: K and V, or one entry and nothing.

        `index_apart`: with an indexer's key in V's place, where it else ends the entry.
        """
        if kind.mixer == "latent":
            assert self.mla is not None
            index = self.mla.index.kept if kind.index == "own" and self.mla.index else 0
            entry = self.mla.entry
            return ((entry,), (index,)) if index_apart else ((entry + index,), (0,))
        if kind.mixer == "compressed":
            assert self.compressed is not None
            has_windows, chooses = kind.window_size > 0, kind.index == "own"
            return (self.compressed.kept(has_windows=has_windows, chooses=chooses),), (0,)
        shape = self.shape(kind)
        if kind.mixer == "indexed":
            assert self.index is not None
            return (shape.kv_heads * (shape.dim + shape.v_dim) + self.index.kept,), (0,)
        return (shape.kv_heads, shape.dim), (shape.kv_heads, shape.v_dim)

    @property
    def attended(self) -> int:
        """Numbers that heads together give for a row, in the layer where they give most."""
        shapes = [self.shape(kind) for kind in self.layers if kind.attends]
        return max((shape.heads * shape.v_dim for shape in shapes), default=0)

    def slot_values(self, kind: LayerKind) -> int:
        """Numbers that a layer keeps of a token; one that does not attend none."""
        return sum(prod(shape) for shape in self.kept(kind)) if kind.attends else 0

    @property
    def rope_of_head(self) -> RopeConfig:
        """How the block of a head rotates."""
        return self.head_rope or self.shape(self.head_layer).rope

    def more_states(self, kind: LayerKind) -> tuple[tuple[int, int], ...]:
        """Rows and channels of further states that a recurrent layer keeps."""
        if not kind.has_ngrams:
            return ()
        assert self.ngrams is not None and self.streams is not None
        return self.ngrams.kept(self.streams.count * self.hidden)

    def state_size(self, layout: HeadLayout) -> int:
        """Numbers in the state that a head with this layout is fed, and hands on."""
        streams = self.streams if layout.trunk_hidden == "before_hc_head" else None
        return self.hidden * (1 if streams is None else streams.count)

    def shape(self, kind: LayerKind) -> AttentionShape:
        """The geometry of a layer that attends."""
        if kind.mixer == "sliding":
            assert self.sliding is not None
            return self.sliding
        return AttentionShape(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            dim=self.head_dim,
            v_dim=self.v_dim,
            rope=self.rope,
        )


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config of a family that runs here, or UnsupportedFamily with what is in the way."""
    model_type = str(raw.get("model_type"))
    owner, runtime = family_of_trunk(raw, model_type), runtimes().get(model_type)
    runs = owner is not None and (model_type in PLAIN_TRUNKS or model_type in owner.run_types)
    if owner is None or runtime is None or not runs:
        raise _does_not_run(model_type, owner)
    raw = runtime.complete(raw)
    _refuse_lists(raw)
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedFamily(f"hidden_act is {activation!r}; the engine computes silu only.")
    heads = size(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    layers = size(raw, "num_hidden_layers")
    head_dim = int(raw.get("head_dim") or size(raw, "hidden_size") // heads)
    by_channel, has_delta, has_mamba = (
        has_layers_with(parameter, owner, runtime, raw) for parameter in (KIMI, DELTA, MAMBA)
    )
    delta = None
    if by_channel or (has_delta and not has_mamba):
        delta = delta_config(raw, layers, by_channel=by_channel)
    held = parameters_by_layer(owner, runtime, raw, layers)
    rotates = runtime.rotates and bool(raw.get("attention_rotates", True))
    slides = [owner.trunk.slides(raw, layer) for layer in range(layers + 1)]
    made = [kind_of(*each) for each in zip(held, slides, strict=True)]
    made = [windowed(kind, raw, i) for i, kind in enumerate(made[:-1])] + made[-1:]
    *trunk_kinds, head_kind = (limited(kind, raw, i) for i, kind in enumerate(made))
    kinds = with_shared_indexers(trunk_kinds)
    sliding = sliding_shape(raw) if any(slides) else None
    mla = None
    if head_kind.mixer == "latent":
        has_index = any(kind.index == "own" for kind in kinds)
        mla = mla_config(raw, held[-1], has_index=has_index, rotates=rotates)
    if mla is not None:
        head_dim = mla.qk_dim
    compressed = None
    if head_kind.mixer == "compressed":
        has_index = any(kind.index == "own" for kind in kinds)
        compressed = compressed_config(raw, has_index=has_index)
    rope = NO_ROTATION if compressed is None else compressed.rope
    if compressed is None and (rotates or raw.get("head_rotates")):
        rope = rope_config(
            raw,
            head_dim if mla is None else mla.rope_dim,
            may_be_partial=runtime.partial_rotary,
            is_interleaved=bool(raw.get("rope_interleave")),
        )
    routers = [names for names in held if ROUTER in names]
    experts = next((names for names in routers if BY_TOKEN not in names), None)
    return ModelConfig(
        model_type=model_type,
        num_layers=layers,
        hidden=size(raw, "hidden_size"),
        intermediate=_intermediate(raw, (*kinds, head_kind)),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        v_dim=int(raw.get("v_head_dim") or head_dim) if sliding is not None else head_dim,
        vocab=size(raw, "vocab_size"),
        eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope if rotates else NO_ROTATION,
        qkv_bias=attention_bias,
        o_bias=attention_bias and runtime.output_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=bool(raw.get("use_qk_norm")),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=int(raw.get("max_position_embeddings") or 2048),
        windows=_windows(raw, kinds, sliding, has_windows=runtime.has_windows),
        layers=kinds,
        head_layer=head_kind,
        moe=None if experts is None else moe_config(raw, experts),
        delta=delta,
        mamba=mamba_config(raw) if any(MAMBA in names for names in held) else None,
        mla=mla,
        compressed=compressed,
        index=mean_index(raw, rope.dim) if head_kind.mixer == "indexed" else None,
        sliding=sliding,
        v_scale=float(raw.get("attention_value_scale") or 1.0),
        gated_attention=runtime.gated_attention,
        streams=_streams(raw, owner, runtime),
        ngrams=ngram_config(raw) if any(NGRAMS in names for names in held) else None,
        head_gate=bool(raw.get("use_head_wise_attn_gate")),
        gated_mlp=not any(names & UNGATED for names in held),
        centred_norms=owner.layout.zero_centred_norms,
        head_rope=_head_rope(raw, rope, rotates=rotates),
        qkv_ranks=size(raw, runtime.qkv_ranks) if runtime.qkv_ranks else 0,
    )


def _does_not_run(model_type: str, owner: Family | None) -> UnsupportedFamily:
    lacks = "" if owner is None else f" It would need {owner.engine_lacks}."
    return UnsupportedFamily(
        f"the embedded engine does not run model_type {model_type!r}; it runs "
        f"{', '.join(runtimes())}.{lacks} `headstart launch` has commands for other engines, "
        "and files are handled all the same."
    )


# Fields that some models give layer by layer, and that are read here as one value.
_ONE_VALUE = ("head_dim", "num_key_value_heads", "rope_theta", "v_head_dim", "head_rope_theta")


def _refuse_lists(raw: Mapping[str, Any]) -> None:
    """What a family's runtime has not made one value of is not computed layer by layer."""
    listed = [name for name in _ONE_VALUE if isinstance(raw.get(name), list)]
    if listed:
        raise UnsupportedFamily(
            f"{some(listed)} {'are' if len(listed) > 1 else 'is'} given layer by layer; the engine "
            f"computes {raw.get('model_type')} models with one value for all layers."
        )


def _windows(
    raw: Mapping[str, Any],
    kinds: tuple[LayerKind, ...],
    sliding: AttentionShape | None,
    *,
    has_windows: bool,
) -> tuple[int | None, ...]:
    if sliding is not None:
        return tuple(sliding.window if kind.mixer == "sliding" else None for kind in kinds)
    # layer_types mean something else there
    if any(
        not kind.attends or kind.index != "none" or kind.mixer == "compressed" for kind in kinds
    ):
        return (None,) * len(kinds)
    return windows_by_layer(raw, len(kinds), has_windows=has_windows)


def _head_rope(raw: Mapping[str, Any], rope: RopeConfig, *, rotates: bool) -> RopeConfig | None:
    if rope == NO_ROTATION:
        return None
    own = replace(rope, theta=float(raw.get("head_rope_theta") or rope.theta))
    return None if rotates and own == rope else own


def _intermediate(raw: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> int:
    """The width of dense layers; a model without any need not say."""
    is_needed = any(kind.feed == "dense" for kind in kinds)
    return size(raw, "intermediate_size") if is_needed else 0


def _streams(raw: Mapping[str, Any], owner: Family, runtime: Runtime) -> StreamConfig | None:
    if runtime.streams is None:
        return None
    outside = held_by({part.name for part in owner.trunk.extras}, runtime.parameters)
    return stream_config(raw, runtime.streams, outside)
