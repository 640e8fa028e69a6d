"""What each layer of a model is made of, by the parameters that its family's tables give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.base import Family
from headstart.families.parameters import held_by
from headstart.families.runtime import Runtime
from headstart.models.moe_config import Limit

Mixer = Literal[
    "attention", "sliding", "latent", "indexed", "compressed", "delta", "mamba", "none"
]  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """What a layer is made of."""

    # "none": the layer has the other part alone
    mixer: Mixer = "attention"
    feed: Literal["dense", "moe", "none"] = "dense"
    # how entries are chosen that latent attention sees, or windows that compressed attention does
    index: Literal["none", "own", "shared"] = "none"
    window_size: int = 0  # of windows that compressed attention makes entries of; 0: it makes none
    routes_by_token: bool = False  # whether a table says which experts a token has
    norms: Literal["before", "after"] = "before"  # of the parts: of what they read, or give
    # what the halves of an expert's inner product are cut off at; shared and dense ones' apart
    limit: Limit | None = None
    shared_limit: Limit | None = None
    has_streams: bool = False  # whether it reads and writes several residual streams
    has_ngrams: bool = False  # whether it adds an embedding of several tokens to them

    @property
    def is_recurrent(self) -> bool:
        """Whether it keeps a state instead of keys and values."""
        return self.mixer in ("delta", "mamba")

    @property
    def attends(self) -> bool:
        """Whether it keeps keys and values of every token, or an entry."""
        return self.mixer in ("attention", "sliding", "latent", "indexed", "compressed")


# parameters that tell what a layer is made of
DELTA, _LATENT = "attention.conv", "attention.kv_up"
_INDEXER, ROUTER = "attention.indexer.k.weight", "mlp.router.weight"
KIMI, _MEANS = "attention.q_conv", "attention.indexer.qk.weight"
NGRAMS = "ngrams.key.weight"
_STREAMS = ("attention_streams.shares.weight", "attention_streams.gates.down.weight")
MAMBA, _OUT, _DENSE = "attention.skip", "attention.o.weight", "mlp.down.weight"
_OUT_NORM = "mlp_out_norm.weight"
_GROUPS, _WINDOW_INDEX = "attention.o_groups", "attention.indexer.windows.bias"
BY_TOKEN = "mlp.router.by_token"
UNGATED = frozenset({"mlp.up.weight", "mlp.experts.up.weight"})


def has_layers_with(
    parameter: str, owner: Family, runtime: Runtime, raw: Mapping[str, Any]
) -> bool:
    """Whether some kind of the family's layers has a parameter, as those that keep a state do."""
    tables = owner.trunk.layer_kinds(raw).values()
    return any(parameter in held_by({p.name for p in t}, runtime.parameters) for t in tables)


def parameters_by_layer(
    owner: Family, runtime: Runtime, raw: Mapping[str, Any], layers: int
) -> list[frozenset[str]]:
    """Our parameters of every layer of the trunk and, last, of the block of its head."""
    kinds = owner.trunk.layer_kinds(raw)
    named = [owner.trunk.kind_of(raw, layer) for layer in range(layers)]
    if unknown := sorted(set(named) - set(kinds)):
        raise UnsupportedFamily(
            f"layer {named.index(unknown[0])} is {unknown[0]!r} by its types (layer_types, "
            f"mlp_layer_types); the engine computes {', '.join(kinds)} for {owner.name}."
        )
    tables = [kinds[name] for name in named]
    tables.append(owner.block(owner.fields_of_head(raw)))
    names = [runtime.parameters] * layers + [runtime.head_parameters or runtime.parameters]
    return [
        held_by({part.name for part in table if part.applies(raw)}, own)
        for table, own in zip(tables, names, strict=True)
    ]


def kind_of(held: frozenset[str], slides: bool) -> LayerKind:
    mixer: Mixer = "sliding" if slides else "attention"
    if MAMBA in held:
        mixer = "mamba"
    elif DELTA in held or KIMI in held:
        mixer = "delta"
    elif _LATENT in held:
        mixer = "latent"
    elif _GROUPS in held:
        mixer = "compressed"
    elif _MEANS in held:
        mixer = "indexed"
    elif _OUT not in held:
        mixer = "none"
    return LayerKind(
        mixer=mixer,
        norms="after" if _OUT_NORM in held else "before",
        index="own" if held & {_INDEXER, _WINDOW_INDEX} else "none",
        routes_by_token=BY_TOKEN in held,
        feed="moe" if ROUTER in held else "dense" if _DENSE in held else "none",
        has_streams=not held.isdisjoint(_STREAMS),
        has_ngrams=NGRAMS in held,
    )


def with_shared_indexers(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """Latent attention without an indexer uses that of an earlier layer, if there is any."""
    latent = [kind for kind in kinds if kind.mixer == "latent"]
    if all(kind.index == "none" for kind in latent):
        return tuple(kinds)
    if latent[0].index == "none":
        raise BadConfig(
            "the first layer has no indexer, and there is none before it that it could share. "
            "Take the config.json of the model's release."
        )
    return tuple(
        replace(kind, index="shared") if (kind.mixer, kind.index) == ("latent", "none") else kind
        for kind in kinds
    )


def windowed(kind: LayerKind, raw: Mapping[str, Any], layer: int) -> LayerKind:
    """With the size of the windows that a layer compresses, where a config lists it."""
    sizes = raw.get("compress_ratios") or []
    size = sizes[layer] if kind.mixer == "compressed" and layer < len(sizes) else 0
    return replace(kind, window_size=int(size or 0))


def limited(kind: LayerKind, raw: Mapping[str, Any], layer: int) -> LayerKind:
    """With the limits of a layer, where a config lists them; 0 means none."""
    lists = [raw.get(name) or [] for name in ("swiglu_limits", "swiglu_limits_shared")]
    is_before = bool(raw.get("limits_before_activation"))
    limit, shared = (
        Limit(float(part[layer]), is_before) if len(part) > layer and part[layer] else None
        for part in lists
    )
    return replace(kind, limit=limit, shared_limit=shared)
