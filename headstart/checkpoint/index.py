"""Which tensor is in which shard.

Detection must see every tensor that is on disk, so all `*.safetensors` headers are read, whether
an index lists them or not; the index is then held against them. Names in an index are only ever
used as names of files directly inside the folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.checkpoint.compare import same_bytes
from headstart.checkpoint.header import Header, TensorInfo, read_header
from headstart.documents import parse_json
from headstart.errors import BrokenFile, BrokenIndex, CheckpointError, some
from headstart.files import read_plain, why_unreadable

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Index:
    """The tensors of a folder and how its index describes them."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, dict[str, str]]  # shard name -> its safetensors metadata
    has_index: bool
    unlisted: tuple[str, ...]  # shards that the index does not mention
    duplicates: dict[str, tuple[str, ...]]  # tensors in several shards -> all of these
    index_metadata: dict[str, Any]

    @property
    def shards(self) -> dict[str, list[TensorInfo]]:
        """Shard name -> its tensors in file order."""
        result: dict[str, list[TensorInfo]] = {name: [] for name in sorted(self.metadata)}
        for info in self.tensors.values():
            result[info.file.name].append(info)
        for infos in result.values():
            infos.sort(key=lambda info: info.start)
        return result


def read_index(folder: Path) -> Index:
    """Read all shard headers of `folder` and check the index against them."""
    weight_map, index_metadata = _read_weight_map(folder)
    # Hidden files are left by copying tools and are no part of the model.
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("."))
    if not files and weight_map is None:
        raise CheckpointError(_no_weights(folder))
    present = {file.name for file in files}
    if weight_map is not None:
        absent = sorted(set(weight_map.values()) - present)
        if absent:
            raise BrokenIndex(
                f"{folder / INDEX_NAME} names {some(map(repr, absent))}, which is not in the "
                "folder. Download the missing shards, or mend the index."
            )
    headers = {file.name: read_header(file) for file in files}
    tensors, duplicates = _merge(headers, weight_map)
    if weight_map is not None:
        _check_weight_map(folder, weight_map, headers)
    listed = present if weight_map is None else set(weight_map.values())
    return Index(
        tensors,
        {name: header.metadata for name, header in headers.items()},
        weight_map is not None,
        tuple(sorted(present - listed)),
        duplicates,
        index_metadata,
    )


def _read_weight_map(folder: Path) -> tuple[dict[str, str] | None, dict[str, Any]]:
    path = folder / INDEX_NAME
    if not os.path.lexists(path):  # a link that points nowhere is an index all the same
        return None, {}
    try:
        document = parse_json(read_plain(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenIndex(
            f"{path} cannot be read ({why_unreadable(error)}). Download the file again."
        ) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise BrokenIndex(
            f"{path} has no weight_map of names to shard names. Download the file again."
        )
    for shard in set(weight_map.values()):
        # An index is not trusted: it must not reach outside its own folder.
        if shard != Path(shard).name or shard in ("", ".", "..") or "\\" in shard or "\0" in shard:
            raise BrokenIndex(
                f"{path} names the shard {shard!r}; expected a plain file name in the same folder. "
                "Do not use this index unless you trust its source; mend the entry by hand."
            )
    metadata = document.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _check_weight_map(folder: Path, weight_map: dict[str, str], headers: dict[str, Header]) -> None:
    lost = [name for name, shard in weight_map.items() if name not in headers[shard].tensors]
    if lost:
        raise BrokenIndex(
            f"{folder / INDEX_NAME} places {some(map(repr, lost))} in a shard that does not hold "
            "it. Download index and shards again from one revision."
        )


def _merge(
    headers: dict[str, Header], weight_map: dict[str, str] | None
) -> tuple[dict[str, TensorInfo], dict[str, tuple[str, ...]]]:
    """All tensors by name; a tensor in two shards must have the same bytes in both."""
    merged: dict[str, TensorInfo] = {}
    duplicates: dict[str, tuple[str, ...]] = {}
    for header in headers.values():
        for name, info in header.tensors.items():
            known = merged.setdefault(name, info)
            if known is info:
                continue
            if not _same(known, info):
                raise BrokenFile(
                    f"{name!r} is in {known.file} and in {info.file} with different content; "
                    "expected one copy. Remove the shard that does not belong to this checkpoint."
                )
            places = duplicates.get(name, (known.file.name,))
            duplicates[name] = (*places, info.file.name)
            if weight_map is not None and weight_map.get(name) == info.file.name:
                merged[name] = info
    return merged, duplicates


def _same(known: TensorInfo, info: TensorInfo) -> bool:
    try:
        return same_bytes(known, info)
    except OSError as error:
        raise BrokenFile(
            f"{known.file} or {info.file} cannot be read ({error.strerror}). Copy them again."
        ) from error


def _no_weights(folder: Path) -> str:
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if pickles:
        return (
            f"{folder} holds pickled weights ({some(p.name for p in pickles)}) and no safetensors. "
            "Pickle files can run code when loaded, so Headstart does not open them. Convert "
            'once: python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('IN').save_pretrained('OUT')\" (this drops the head of families "
            "that transformers does not know; look for a safetensors release first)."
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return (
            f"{folder} holds GGUF files ({some(p.name for p in ggufs)}); expected safetensors. "
            "Use the original Hugging Face checkpoint, or give the GGUF file itself to a command "
            "that takes such files."
        )
    return f"{folder} holds no *.safetensors file. Give the folder of a downloaded checkpoint."
