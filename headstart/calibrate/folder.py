"""A made checkpoint as a folder: weights, config, tokenizer, and how it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headstart.calibrate.tokenizer import tokenizer_documents
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    FolderPlan,
    index_document,
    split_shards,
    write_folder,
)
from headstart.families.registry import match_family


def write_made(
    config: dict[str, Any],
    tensors: Mapping[str, TensorSource],
    out: Path,
    *,
    facts: Mapping[str, Any],
    chat_template: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write everything an engine needs to load it."""
    shards = split_shards(tensors, shard_bytes=shard_bytes)
    documents: dict[str, Any] = {"config.json": config, **tokenizer_documents(config)}
    if chat_template is not None:
        documents["chat_template.jinja"] = chat_template
    owner = match_family(config, (config["model_type"],), ())
    documents.update(owner.remote_code if owner is not None else {})
    documents["generation_config.json"] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    if len(shards) > 1:
        weight_map = {name: file for file, shard in shards.items() for name in shard.tensors}
        total = sum(source.num_bytes for source in tensors.values())
        documents["model.safetensors.index.json"] = index_document(weight_map, total)
    write_folder(
        FolderPlan(shards=shards, documents=documents),
        out,
        provenance={"operation": "calibrate", **facts},
        overwrite=overwrite,
        report=report,
    )
