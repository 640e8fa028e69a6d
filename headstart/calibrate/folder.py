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
    tokenizer: Mapping[str, Any] | None = None,
    end_ids: list[int] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write everything an engine needs to load it.

    `tokenizer` are its files by name, else words are numbers; `end_ids` go into the generation
    config, else only config.json has one.
    """
    shards = split_shards(tensors, shard_bytes=shard_bytes)
    own = tokenizer_documents(config) if tokenizer is None else tokenizer
    documents: dict[str, Any] = {"config.json": config, **own}
    owner = match_family(config, (config["model_type"],), ())
    documents.update(owner.remote_code if owner is not None else {})
    documents["generation_config.json"] = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        **({} if end_ids is None else {"eos_token_id": end_ids}),
    }  # fmt: skip
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
