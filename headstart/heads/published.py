"""A model of another format, seen as the checkpoint that was published: for whatever runs it.

Names, shapes and config are those of the release, and values as far as the format kept them.
Nothing is converted before it is read; a quantised weight keeps the type that it is stored in, or
is computed where the format changed more than the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import Config
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import Index
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource


@dataclass(frozen=True)
class PublishedModel(Checkpoint):
    """`folder` is where the model is stored: a folder, or a file of GGUF."""

    sources: Mapping[str, TensorSource]
    stored_trunk: tuple[TensorInfo, ...]  # what the trunk is made of, as its files have it
    documents: Mapping[str, Any] = field(default_factory=dict)  # of a tokenizer inside the file
    said: tuple[str, ...] = ()  # such as why there is no tokenizer

    def source(self, name: str) -> TensorSource:
        self.info(name)  # says what is near, where there is none of the name
        return self.sources[name]

    def tokenizer_documents(self) -> dict[str, Any]:
        return dict(self.documents)

    def remarks(self) -> tuple[str, ...]:
        return self.said


def published_model(
    place: Path,
    config: Mapping[str, Any],
    sources: Mapping[str, TensorSource],
    stored_trunk: Iterable[TensorInfo],
    documents: Mapping[str, Any] | None = None,
    said: tuple[str, ...] = (),
) -> PublishedModel:
    tensors = {
        name: TensorInfo(name, source.dtype, source.shape, place, 0, source.num_bytes)
        for name, source in sources.items()
    }
    index = Index(tensors, {}, False, (), {}, {})
    return PublishedModel(
        place, Config(dict(config)), index, sources, tuple(stored_trunk), documents or {}, said
    )
