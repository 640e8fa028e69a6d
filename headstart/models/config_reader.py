"""The config of a model from what its checkpoint says.

What configs of a family leave out or call differently is in its `Runtime`; nothing here knows a
family. What a model asks for and is not computed is refused by name: a silent difference would only
show as wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.errors import UnsupportedFamily, some
from headstart.families.base import Family
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
from headstart.models.compressed_config import compressed_config
from headstart.models.config import ModelConfig
from headstart.models.delta_config import delta_config
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
from headstart.models.mamba_config import mamba_config
from headstart.models.mla_config import mean_index, mla_config
from headstart.models.moe_config import moe_config
from headstart.models.ngram_embedding import ngram_config
from headstart.models.rope import NO_ROTATION, RopeConfig, rope_config
from headstart.models.streams import StreamConfig, stream_config


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
