"""Sizes and options of a dense model, from its published config.

One frozen dataclass, so that odd spellings are absorbed here and nowhere else. What a model asks
for and we do not compute is refused by name: a silent difference would only show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.models.rope import RopeConfig, rope_config

DENSE_TYPES = ("llama", "qwen2", "qwen3", "mimo")
# of a Qwen config that does not say: the defaults of its class
_MAX_WINDOW_LAYERS = 28
_WINDOW = 4096
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of identical dense layers."""

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


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config of one of the dense families, or UnsupportedFamily with what is in the way."""
    kind = str(raw.get("model_type"))
    if kind not in DENSE_TYPES:
        raise UnsupportedFamily(
            f"the embedded engine does not run model_type {kind!r} yet; it runs "
            f"{', '.join(DENSE_TYPES)}. `headstart launch` has commands for other engines."
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedFamily(f"hidden_act is {activation!r}; the engine computes silu only.")
    heads = _number(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", kind in ("qwen2", "mimo")))
    layers = _number(raw, "num_hidden_layers")
    head_dim = int(raw.get("head_dim") or _number(raw, "hidden_size") // heads)
    return ModelConfig(
        model_type=kind,
        num_layers=layers,
        hidden=_number(raw, "hidden_size"),
        intermediate=_number(raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab=_number(raw, "vocab_size"),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope_config(raw, head_dim),
        qkv_bias=True if kind == "qwen2" else attention_bias,
        o_bias=attention_bias and kind in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=int(raw.get("max_position_embeddings") or 2048),
        windows=_windows(raw, kind, layers),
    )


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
