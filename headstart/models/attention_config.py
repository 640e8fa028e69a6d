"""Sizes of layers that attend, and how far back they see.

Most models have one geometry. Some have a second one for the layers that see a window only, with
heads, rotation and sinks of its own; their heads' blocks have it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.models.rope import RopeConfig, rope_config

# of a Qwen config that does not say: the defaults of its class
_MAX_WINDOW_LAYERS = 28
_WINDOW = 4096
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    heads: int
    kv_heads: int
    dim: int  # of a head's query and key
    v_dim: int
    rope: RopeConfig
    window: int | None = None  # how many tokens a row sees, itself included; None for all
    has_sinks: bool = False  # a score per head that takes part in soft-max and gives nothing


def sliding_shape(raw: Mapping[str, Any]) -> AttentionShape:
    """The geometry of sliding layers, where a family has one apart."""
    names = ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
    heads, kv_heads, dim, v_dim = (size(raw, name) for name in names)
    given = raw.get("swa_rope_parameters")  # what these layers have apart, as a whole
    if given is not None:
        rope = {**raw, "rope_parameters": given}
    else:
        partial = raw.get("swa_partial_rotary_factor")
        rope = {"rope_theta": raw["swa_rope_theta"], "partial_rotary_factor": partial}
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=v_dim,
        rope=rope_config(rope, dim, may_be_partial=given is None),
        window=size(raw, "swa_window"),
        has_sinks=bool(raw.get("add_swa_attention_sink_bias")),
    )


def size(raw: Mapping[str, Any], name: str) -> int:
    """A size that a config must give."""
    value = raw.get(name)
    if type(value) is not int or value < 1:
        found = "lacks" if value is None else f"has {value!r} for"
        raise BadConfig(
            f"config.json {found} {name}; expected a whole number above 0. Take the config.json "
            "of the model's release."
        )
    return value


def windows_by_layer(
    raw: Mapping[str, Any], layers: int, *, has_windows: bool
) -> tuple[int | None, ...]:
    """Sliding windows by layer, as transformers' Qwen reads them; some classes know no windows.

    `sliding_window` counts only with `use_sliding_window`. Layers are named by `layer_types`, or
    lie above `max_window_layers`.
    """
    size = raw.get("sliding_window", _WINDOW) if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if kinds is None:
        if not has_windows or not size:
            return (None,) * layers
        first = int(raw.get("max_window_layers", _MAX_WINDOW_LAYERS))
        return tuple(int(size) if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise BadConfig(
            f"layer_types has {count} entries; expected one for each of {layers} layers."
        )
    known = _LAYER_KINDS if has_windows else _LAYER_KINDS[:1]
    unknown = sorted({str(name) for name in kinds} - set(_LAYER_KINDS))
    if unknown or not set(kinds) <= set(known):
        raise UnsupportedFamily(
            f"layer_types holds {some(unknown or ['sliding_attention'])}; the engine computes "
            f"{' and '.join(known)} for {raw['model_type']}."
        )
    if "sliding_attention" in kinds and not size:
        raise BadConfig(
            "layer_types asks for sliding_attention, and the config gives no window: "
            f"sliding_window is {raw.get('sliding_window')!r}, use_sliding_window "
            f"{raw.get('use_sliding_window')!r}. Set both, or make the layers full_attention."
        )
    window = int(size) if size else None
    return tuple(window if name == "sliding_attention" else None for name in kinds)
