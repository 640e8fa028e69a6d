"""The head of GLM-5.3-Flash in xLLM's format: exported as a small model with tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headstart.checkpoint.source import TensorSource
from headstart.errors import UnexpectedTensor
from headstart.heads.head import Head

# our part -> its name in the export
_NAMES = {
    "block": "model.layers.0",
    "embed_norm": "model.enorm",
    "hidden_norm": "model.hnorm",
    "fuse": "model.eh_proj",
    "out_norm": "model.norm",
}
_TABLES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
# fields that the text part has, too, as the export's
_DESCRIBED = (
    "num_hidden_layers", "num_nextn_predict_layers", "architectures", "model_type",
    "quantization_config", "first_k_dense_replace", "index_share_for_mtp_iteration",
    "layer_types", "mlp_layer_types", "indexer_types",
)  # fmt: skip


def their_name(ours: str) -> str:
    role, _, rest = ours.removeprefix("modules.0.").partition(".")
    if role in _NAMES:
        return f"{_NAMES[role]}.{rest}"
    if role not in _TABLES or rest != "weight":
        raise UnexpectedTensor(
            f"xLLM's export has no place for {ours}. Remove it, or use --format headstart."
        )
    return _TABLES[role]


def our_name(theirs: str) -> str | None:
    """Our name of a tensor of the export; None for the tables, which are the trunk's."""
    for role, name in _NAMES.items():
        if theirs.startswith(f"{name}."):
            return f"modules.0.{role}." + theirs.removeprefix(f"{name}.")
    return None


def tensors_of(
    head: Head, tables_of_trunk: Callable[[Head], Mapping[str, TensorSource]]
) -> tuple[dict[str, TensorSource], set[str]]:
    """All tensors of the export, and our names of copies that stand for the trunk's tables."""
    own = {n: s for n, s in head.tensors.items() if n.split(".")[2] in _TABLES}
    tables = {their_name(name): source for name, source in own.items()}
    if len(tables) < len(_TABLES):
        for name, source in tables_of_trunk(head).items():
            role = "lm_head" if name in head.family.trunk.lm_heads else "embed_tokens"
            tables.setdefault(_TABLES[role], source)
    rest = {their_name(n): s for n, s in head.tensors.items() if n not in own}
    return {**rest, **tables}, set(own)


def describe(config: dict[str, Any], count: int) -> None:
    """One sparse layer that chooses keys by itself; xLLM's loader reads the text part."""
    config.update(
        index_share_for_mtp_iteration=False,
        layer_types=["deepseek_sparse_attention"] * count,
        mlp_layer_types=["sparse"] * count,
        indexer_types=["full"] * count,
    )
    text = config.get("text_config")
    if isinstance(text, dict):
        text.update({field: config[field] for field in _DESCRIBED})
