"""Sizes and options of a model, from its published config.

One frozen dataclass, so that odd spellings are absorbed here and nowhere else. What a model asks
for and we do not compute is refused by name: a silent difference would only show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.families.base import Family, Part
from headstart.families.registry import match_family
from headstart.models.delta_config import SILENT as _DELTA
from headstart.models.delta_config import DeltaConfig, delta_config
from headstart.models.mla_config import MlaConfig, mla_config
from headstart.models.moe_config import MoeConfig, moe_config
from headstart.models.rope import RopeConfig, rope_config

_HYBRID: dict[str, Any] = {
    **_DELTA,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "use_qk_norm": True,
}
_LATENT: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "n_shared_experts": 1,
}
# model_type -> what its published class takes where a config does not say
_SILENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {},
    "mimo": {"attention_bias": True},
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
        "moe_num_shared_experts": 2,
    },
    "deepseek_v3": {
        **_LATENT,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
    },
    "qwen3_next": _HYBRID,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _HYBRID),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _HYBRID),
}
RUN_TYPES = tuple(_SILENT)
# gated attention and gated delta nets
_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_PARTLY_ROTATED = ("glm4_moe", *_HYBRIDS)
_ROTATED_IN_NEIGHBOURS = ("ernie4_5_moe",)
# of a Qwen config that does not say: the defaults of its class
_MAX_WINDOW_LAYERS = 28
_WINDOW = 4096
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class LayerKind:
    """What a layer is made of."""

    mixer: Literal["attention", "latent", "delta"] = "attention"
    feed: Literal["dense", "moe"] = "dense"


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
    gated_attention: bool  # whether a sigmoid of the row scales what attention gives
    centred_norms: bool  # whether a norm's weight is 1 more than what is stored

    @property
    def num_recurrent(self) -> int:
        """Layers that keep a state instead of keys and values."""
        return sum(kind.mixer == "delta" for kind in self.layers)

    def kept(self, kind: LayerKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what a layer keeps of a token: K and V, or one entry and nothing."""
        if kind.mixer == "latent":
            assert self.mla is not None
            return (self.mla.entry,), (0,)
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config of a family that runs here, or UnsupportedFamily with what is in the way."""
    kind = str(raw.get("model_type"))
    if kind not in RUN_TYPES:
        raise UnsupportedFamily(
            f"the embedded engine does not run model_type {kind!r} yet; it runs "
            f"{', '.join(RUN_TYPES)}. `headstart launch` has commands for other engines."
        )
    raw = {**raw, **{name: value for name, value in _SILENT[kind].items() if raw.get(name) is None}}
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedFamily(f"hidden_act is {activation!r}; the engine computes silu only.")
    if raw.get("use_bias"):
        raise UnsupportedFamily(
            "use_bias is true; the engine computes ERNIE without biases, as all its releases are."
        )
    heads = _number(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    layers = _number(raw, "num_hidden_layers")
    head_dim = int(raw.get("head_dim") or _number(raw, "hidden_size") // heads)
    owner = match_family(raw, (kind,), ())
    is_hybrid = kind in _HYBRIDS
    delta = delta_config(raw, layers) if is_hybrid else None
    tables, head_table = _tables(owner, raw, layers)
    kinds = tuple(_kind(table) for table in tables)
    mla = mla_config(raw) if any(kind.mixer == "latent" for kind in kinds) else None
    if mla is not None:
        head_dim = mla.qk_dim
    experts = next((t for t in (*tables, head_table) if _kind(t).feed == "moe"), None)
    return ModelConfig(
        model_type=kind,
        num_layers=layers,
        hidden=_number(raw, "hidden_size"),
        intermediate=_intermediate(raw, (*kinds, _kind(head_table))),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab=_number(raw, "vocab_size"),
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
        windows=(None,) * layers if is_hybrid else _windows(raw, kind, layers),
        layers=kinds,
        head_layer=_kind(head_table),
        moe=None if experts is None else moe_config(raw, experts),
        delta=delta,
        mla=mla,
        gated_attention=is_hybrid,
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


def _kind(table: _Table) -> LayerKind:
    return LayerKind(
        mixer=next((mixer for name, mixer in _MIXERS.items() if name in table), "attention"),
        feed="moe" if "mlp.gate.weight" in table else "dense",
    )


def _intermediate(raw: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> int:
    """The width of dense layers; a model without any need not say."""
    is_needed = any(kind.feed == "dense" for kind in kinds)
    return _number(raw, "intermediate_size") if is_needed else 0


def _number(raw: Mapping[str, Any], name: str) -> int:
    """A size that a config must give."""
    value = raw.get(name)
    if type(value) is not int or value < 1:
        found = "lacks" if value is None else f"has {value!r} for"
        raise BadConfig(
            f"config.json {found} {name}; expected a whole number above 0. Take the config.json "
            "of the model's release."
        )
    return value


def _windows(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer, as transformers' Qwen reads them.

    `sliding_window` counts only with `use_sliding_window`. Layers are named by `layer_types`, or
    lie above `max_window_layers`.
    """
    size = raw.get("sliding_window", _WINDOW) if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if kinds is None:
        if kind == "llama" or not size:  # Llama's own implementation knows no windows
            return (None,) * layers
        first = int(raw.get("max_window_layers", _MAX_WINDOW_LAYERS))
        return tuple(int(size) if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise BadConfig(
            f"layer_types has {count} entries; expected one for each of {layers} layers."
        )
    unknown = sorted({str(name) for name in kinds} - set(_LAYER_KINDS))
    if unknown or (kind == "llama" and "sliding_attention" in kinds):
        raise UnsupportedFamily(
            f"layer_types holds {some(unknown or ['sliding_attention'])}; the engine computes "
            f"{' and '.join(_LAYER_KINDS[: 1 if kind == 'llama' else 2])} for {kind}."
        )
    if "sliding_attention" in kinds and not size:
        raise BadConfig(
            "layer_types asks for sliding_attention, and the config gives no window: "
            f"sliding_window is {raw.get('sliding_window')!r}, use_sliding_window "
            f"{raw.get('use_sliding_window')!r}. Set both, or make the layers full_attention."
        )
    return tuple(int(size) if name == "sliding_attention" else None for name in kinds)  # type: ignore[arg-type]
