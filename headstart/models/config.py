"""Sizes and options of a model, from its published config.

One frozen dataclass, so that odd spellings are absorbed here and nowhere else. What a model asks
for and we do not compute is refused by name: a silent difference would only show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from headstart.errors import BadConfig
from headstart.families.base import Family, Part
from headstart.families.registry import match_family
from headstart.models.attention_config import (
    AttentionShape,
    size,
    sliding_shape,
    windows_by_layer,
)
from headstart.models.delta_config import DeltaConfig, delta_config
from headstart.models.mla_config import MlaConfig, mla_config
from headstart.models.moe_config import MoeConfig, moe_config
from headstart.models.rope import RopeConfig, rope_config
from headstart.models.spelling import spelled

# gated attention and gated delta nets
_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_PARTLY_ROTATED = ("glm4_moe", "mimo_v2_flash", "step3p5", "step3p7", *_HYBRIDS)
_ROTATED_IN_NEIGHBOURS = ("ernie4_5_moe",)


@dataclass(frozen=True)
class LayerKind:
    """What a layer is made of."""

    mixer: Literal["attention", "sliding", "latent", "delta"] = "attention"
    feed: Literal["dense", "moe"] = "dense"
    index: Literal["none", "own", "shared"] = "none"  # who says what latent attention sees
    # what the halves of an expert's inner product are cut off at; shared and dense ones' apart
    limit: float | None = None
    shared_limit: float | None = None


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
    mla: MlaConfig | None  # of latent attention
    sliding: AttentionShape | None  # of layers that see a window, where they have their own
    v_scale: float  # of all values
    gated_attention: bool  # whether a sigmoid of the row scales what attention gives
    head_gate: bool  # whether a sigmoid of the row scales what each head gives
    centred_norms: bool  # whether a norm's weight is 1 more than what is stored

    @property
    def num_recurrent(self) -> int:
        """Layers that keep a state instead of keys and values."""
        return sum(kind.mixer == "delta" for kind in self.layers)

    def kept(self, kind: LayerKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what a layer keeps of a token: K and V, or one entry and nothing."""
        if kind.mixer == "latent":
            assert self.mla is not None
            index = self.mla.index.dim if kind.index == "own" and self.mla.index else 0
            return (self.mla.entry + index,), (0,)
        shape = self.shape(kind)
        return (shape.kv_heads, shape.dim), (shape.kv_heads, shape.v_dim)

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
    raw = spelled(raw)
    kind = str(raw["model_type"])
    heads = size(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    layers = size(raw, "num_hidden_layers")
    head_dim = int(raw.get("head_dim") or size(raw, "hidden_size") // heads)
    owner = match_family(raw, (kind,), ())
    is_hybrid = kind in _HYBRIDS
    delta = delta_config(raw, layers) if is_hybrid else None
    tables, head_table = _tables(owner, raw, layers)
    slides = [owner is not None and owner.trunk.slides(raw, i) for i in range(layers + 1)]
    made = [_kind(*each) for each in zip([*tables, head_table], slides, strict=True)]
    *trunk_kinds, head_kind = (_limited(kind, raw, i) for i, kind in enumerate(made))
    kinds = _with_shared_indexers(trunk_kinds)
    sliding = sliding_shape(raw) if any(slides) else None
    mla = None
    if head_kind.mixer == "latent":
        mla = mla_config(raw, has_index=any(kind.index == "own" for kind in kinds))
    if mla is not None:
        head_dim = mla.qk_dim
    experts = next((t for t in (*tables, head_table) if _kind(t).feed == "moe"), None)
    return ModelConfig(
        model_type=kind,
        num_layers=layers,
        hidden=size(raw, "hidden_size"),
        intermediate=_intermediate(raw, (*kinds, head_kind)),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        v_dim=int(raw.get("v_head_dim") or head_dim) if sliding is not None else head_dim,
        vocab=size(raw, "vocab_size"),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope_config(
            raw,
            head_dim if mla is None else mla.rope_dim,
            may_be_partial=kind in _PARTLY_ROTATED,
            is_interleaved=kind in _ROTATED_IN_NEIGHBOURS or bool(raw.get("rope_interleave")),
        ),
        qkv_bias=True if kind == "qwen2" else attention_bias,
        o_bias=attention_bias and kind in ("llama", "qwen3", *_HYBRIDS),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=bool(raw.get("use_qk_norm", kind == "qwen3")),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=int(raw.get("max_position_embeddings") or 2048),
        windows=_windows(raw, kinds, sliding),
        layers=kinds,
        head_layer=head_kind,
        moe=None if experts is None else moe_config(raw, experts),
        delta=delta,
        mla=mla,
        sliding=sliding,
        v_scale=float(raw.get("attention_value_scale") or 1.0),
        gated_attention=is_hybrid,
        head_gate=bool(raw.get("use_head_wise_attn_gate")),
        centred_norms=owner is not None and owner.layout.zero_centred_norms,
    )


_Table = frozenset[str]  # names of the tensors of a layer


def _tables(
    owner: Family | None, raw: Mapping[str, Any], layers: int
) -> tuple[list[_Table], _Table]:
    """The family's own tables for every layer of the trunk, and for the block of its head."""
    if owner is None:  # a trunk without published heads: all its layers are dense
        return [_Table()] * layers, _Table()
    trunk = [_names(owner.trunk.kinds[owner.trunk.kind_of(raw, i)], raw) for i in range(layers)]
    return trunk, _names(_block(owner, raw), raw)


def _block(owner: Family, raw: Mapping[str, Any]) -> tuple[Part, ...]:
    return owner.block(owner.fields_of_head(raw))


def _names(table: tuple[Part, ...], raw: Mapping[str, Any]) -> _Table:
    return _Table(part.name for part in table if part.applies(raw))


# a tensor of a layer -> its mixer
_MIXERS: dict[str, Literal["latent", "delta"]] = {
    "linear_attn.conv1d.weight": "delta",
    "self_attn.kv_b_proj.weight": "latent",
}


_INDEX_KEY = "self_attn.indexer.wk.weight"


def _kind(table: _Table, slides: bool = False) -> LayerKind:
    usual: Literal["sliding", "attention"] = "sliding" if slides else "attention"
    return LayerKind(
        mixer=next((mixer for name, mixer in _MIXERS.items() if name in table), usual),
        index="own" if _INDEX_KEY in table else "none",
        feed="moe" if {"mlp.gate.weight", "moe.gate.weight"} & table else "dense",
    )


def _with_shared_indexers(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """Latent attention without an indexer uses that of an earlier layer, if there is any."""
    if all(kind.index == "none" for kind in kinds):
        return tuple(kinds)
    if kinds[0].index == "none":
        raise BadConfig(
            "the first layer has no indexer, and there is none before it that it could share. "
            "Take the config.json of the model's release."
        )
    return tuple(
        replace(kind, index="shared") if (kind.mixer, kind.index) == ("latent", "none") else kind
        for kind in kinds
    )


def _limited(kind: LayerKind, raw: Mapping[str, Any], layer: int) -> LayerKind:
    """With the limits of a layer, where a config lists them; 0 means none."""
    lists = [raw.get(name) or [] for name in ("swiglu_limits", "swiglu_limits_shared")]
    limit, shared = (
        float(part[layer] or 0) or None if len(part) > layer else None for part in lists
    )
    return replace(kind, limit=limit, shared_limit=shared)


def _windows(
    raw: Mapping[str, Any], kinds: tuple[LayerKind, ...], sliding: AttentionShape | None
) -> tuple[int | None, ...]:
    if sliding is not None:
        return tuple(sliding.window if kind.mixer == "sliding" else None for kind in kinds)
    # layer_types mean something else there
    if any(kind.mixer == "delta" or kind.index != "none" for kind in kinds):
        return (None,) * len(kinds)
    return windows_by_layer(raw, str(raw["model_type"]), len(kinds))


def _intermediate(raw: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> int:
    """The width of dense layers; a model without any need not say."""
    is_needed = any(kind.feed == "dense" for kind in kinds)
    return size(raw, "intermediate_size") if is_needed else 0
