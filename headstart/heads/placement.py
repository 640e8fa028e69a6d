"""Where every file and tensor of a model goes when its head is replaced.

Shards without head tensors are copied whole. Replaced tensors stay in their shard, new ones go
into a shard of their own (or into the only file there is). Other files come along, those in
sub-folders, too; what is left behind is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headstart.checkpoint.index import INDEX_NAME
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import Shard, index_document, split_shards
from headstart.errors import some
from headstart.heads.operation import counted

_NEW_SHARD = "model-mtp"
_COUNT = "total_parameters"  # index metadata that only the library that wrote it can count


@dataclass(frozen=True)
class Placement:
    """The files of a result, and in words what became of those of the model."""

    shards: Mapping[str, Shard]
    copies: Mapping[str, Path]
    documents: Mapping[str, Any]
    summary: str
    notes: tuple[str, ...]


def placement(
    model: Checkpoint, tensors: Mapping[str, TensorSource], removed: set[str]
) -> Placement:
    """`model` with `tensors` put in and `removed` taken out."""
    shards, whole = _own_shards(model, tensors, removed)
    placed = {info.name: info.file.name for info in model.tensors.values()}
    added = {name: source for name, source in tensors.items() if name not in placed}
    placed = {name: file for name, file in placed.items() if name not in removed}
    single = len(model.index.metadata) == 1 and not model.index.has_index
    if added and single:
        # A model of one file stays one: loaders would not look for a second without an index.
        file = next(iter(model.index.metadata))
        base = shards.get(file)
        old = base.tensors if base else {n: model.source(n) for n in sorted(placed)}
        shards[file] = Shard({**old, **added}, model.index.metadata[file])
        whole.pop(file, None)
    elif added:
        for file, shard in split_shards(added, stem=_free_stem(model)).items():
            shards[file] = shard
            placed.update(dict.fromkeys(shard.tensors, file))
    result = {**{n: model.source(n) for n in placed if n not in tensors}, **tensors}
    metadata = _index_metadata(model, result)
    total = sum(source.num_bytes for source in result.values())
    return Placement(
        shards,
        {**model.files_below(), **whole},
        {} if single else {INDEX_NAME: index_document(placed, total, metadata)},
        f"{counted(len(tensors) - len(added), 'tensor')} replaced, {len(added)} added, "
        f"{len(removed)} removed; {counted(len(shards), 'shard')} written, {len(whole)} copied "
        "unchanged",
        tuple(_notes(model, metadata)),
    )


def _own_shards(
    model: Checkpoint, tensors: Mapping[str, TensorSource], removed: set[str]
) -> tuple[dict[str, Shard], dict[str, Path]]:
    """The shards of `model` that are written anew, and those that are copied whole."""
    touched = set(tensors) | removed
    duplicated = {
        shard
        for name, files in model.index.duplicates.items()
        if name in touched
        for shard in files
    }
    shards: dict[str, Shard] = {}
    whole: dict[str, Path] = {}
    for file, infos in model.index.shards.items():
        names = {info.name for info in infos}
        keep = sorted(names - removed)
        if not names & touched and file not in duplicated:
            whole[file] = model.folder / file
        elif keep:
            contents = {n: tensors[n] if n in tensors else model.source(n) for n in keep}
            shards[file] = Shard(contents, model.index.metadata[file])
    return shards, whole


def _index_metadata(model: Checkpoint, result: Mapping[str, TensorSource]) -> dict[str, Any]:
    metadata = dict(model.index.index_metadata)
    before = sum(prod(info.shape) for info in model.tensors.values())
    if before != sum(prod(source.shape) for source in result.values()):
        metadata.pop(_COUNT, None)
    return metadata


def _notes(model: Checkpoint, metadata: Mapping[str, Any]) -> Iterator[str]:
    foreign = model.foreign_weights()
    if foreign:
        yield (
            f"left out: {some(foreign)} (pickled weights and GGUF files are not opened, and do "
            "not have this head)"
        )
    if model.index.index_metadata.keys() - metadata.keys():
        yield f"left out: {_COUNT} of the index, which no longer holds"


def _free_stem(model: Checkpoint) -> str:
    stem, count = _NEW_SHARD, 2
    while any(file.startswith(stem) for file in model.index.metadata):
        stem, count = f"{_NEW_SHARD}-{count}", count + 1
    return stem
