"""Sizes and options of a dense model, from its published config.

One frozen dataclass, so that odd spellings are absorbed here and nowhere else. What a model asks
for and we do not compute is refused by name: a silent difference would only show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import UnsupportedFamily
from headstart.models.rope import RopeConfig, rope_config

DENSE_TYPES = ("llama", "qwen2", "qwen3", "mimo")
_MAX_WINDOW_LAYERS = 28  # of a Qwen config that does not say: the default of its class


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
    head_window: int | None = None  # of the head's block


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
    heads = int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", kind in ("qwen2", "mimo")))
    layers = int(raw["num_hidden_layers"])
    head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
    return ModelConfig(
        model_type=kind,
        num_layers=layers,
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab=int(raw["vocab_size"]),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope_config(raw, head_dim),
        qkv_bias=True if kind == "qwen2" else attention_bias,
        o_bias=attention_bias and kind in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=int(raw.get("max_position_embeddings") or 2048),
        windows=_windows(raw, layers),
    )


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding windows, as Qwen configs ask for them: by layer_types, or above max_window_layers."""
    size = raw.get("sliding_window")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and size:
        return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds[:layers])
    if not raw.get("use_sliding_window") or not size:
        return (None,) * layers
    first = int(raw.get("max_window_layers", _MAX_WINDOW_LAYERS))
    return tuple(int(size) if layer >= first else None for layer in range(layers))
