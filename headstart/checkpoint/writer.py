"""Writes a checkpoint folder from a plan: new shards, copied files, small documents.

Copied bytes never pass through memory (`checkpoint/transfer.py`), computed ones piece by piece.
Finished parts are flushed, and read back and compared (`checkpoint/proof.py`), while the next
ones are written; the folder appears under its name only after all of that.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from headstart.checkpoint.atomic import building, check_target
from headstart.checkpoint.dtypes import DTYPE_BITS
from headstart.checkpoint.gguf.shard import GgufShard, padded
from headstart.checkpoint.header import TensorInfo, read_header
from headstart.checkpoint.local_paths import without_paths
from headstart.checkpoint.proof import Proof
from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.checkpoint.transfer import (
    Copying,
    Flusher,
    Handles,
    Report,
    copy_file,
    copy_range,
    shares_blocks,
    write_all,
)
from headstart.errors import WriteFailed

__all__ = [
    "Copying", "FolderPlan", "Report", "Shard", "header_bytes", "index_document", "split_shards",
    "write_folder",
]  # fmt: skip
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Shard:
    """A new safetensors file."""

    tensors: Mapping[str, TensorSource]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    alignment: ClassVar[int] = 1  # tensors follow one another without padding

    def read_back(self, file: Path) -> dict[str, TensorInfo]:
        """The tensors that `file` holds."""
        return read_header(file).tensors


NewFile = Shard | GgufShard


@dataclass(frozen=True)
class FolderPlan:
    """Everything a result folder will hold, by file name.

    Names may lead into sub-folders (`encoding/x.py`).
    """

    shards: Mapping[str, NewFile] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)  # str as it is, else JSON

    @property
    def num_bytes(self) -> int:
        new = sum(t.num_bytes for shard in self.shards.values() for t in shard.tensors.values())
        return new + sum(_size(path) for path in self.copies.values())


def write_folder(
    plan: FolderPlan,
    out: Path,
    *,
    provenance: Mapping[str, Any],
    inputs: tuple[Path, ...] = (),
    overwrite: bool = False,
    copying: Copying = "copy",
    report: Report = lambda num_bytes: None,
) -> None:
    """Build, prove and install the folder; on any failure nothing is left behind.

    `report` is told how many bytes were just written, for a progress bar.
    """
    _check_names(plan)
    check_target(out, overwrite=overwrite, inputs=inputs)
    with (
        building(out, overwrite=overwrite) as folder,
        Proof() as proof,
        Flusher(report) as flusher,
    ):
        _check_space(plan, folder, out, copying)
        for name, shard in plan.shards.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _write_shard(folder / name, shard, flusher, proof)
        for name, source in plan.copies.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(source, folder / name, copying, flusher)
            proof.file(folder / name, source)
        for name, document in {
            **plan.documents,
            PROVENANCE_NAME: without_paths(provenance),
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _write_document(folder / name, document)
        proof.finish()


def index_document(
    weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The index that engines read, with the total they check downloads by."""
    return {
        "metadata": {**(metadata or {}), "total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }


def split_shards(
    tensors: Mapping[str, TensorSource],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Shard]:
    """Tensors in order, cut into files of at most `shard_bytes` (or one tensor, if larger)."""
    groups: list[dict[str, TensorSource]] = [{}]
    size = 0
    for name, source in tensors.items():
        if groups[-1] and size + source.num_bytes > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = source
        size += source.num_bytes
    if len(groups) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [
            f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)
        ]
    return {
        name: Shard(group) if metadata is None else Shard(group, metadata)
        for name, group in zip(names, groups, strict=True)
    }


def header_bytes(shard: NewFile) -> tuple[bytes, list[str]]:
    """The header of a new file, and the order in which its tensors follow."""
    if isinstance(shard, GgufShard):
        return shard.header(), list(shard.tensors)
    # Wide dtypes first: every tensor then starts at a multiple of its item size.
    order = sorted(shard.tensors, key=lambda n: (-DTYPE_BITS[shard.tensors[n].dtype], n))
    entries: dict[str, Any] = {"__metadata__": dict(shard.metadata)} if shard.metadata else {}
    position = 0
    for name in order:
        source = shard.tensors[name]
        end = position + source.num_bytes
        entries[name] = {
            "dtype": source.dtype,
            "shape": list(source.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _check_names(plan: FolderPlan) -> None:
    """Nothing is ever written outside the result folder, whatever a plan was made from."""
    for name in [*plan.shards, *plan.copies, *plan.documents]:
        parts = PurePosixPath(name).parts
        is_inside = bool(parts) and ".." not in parts and "\0" not in name
        if not is_inside or PurePosixPath(name).is_absolute():
            raise WriteFailed(
                f"{name!r} is not the name of a file inside the result; expected a relative name "
                "without '..'. Nothing was written; look where the file comes from."
            )


def _write_shard(path: Path, shard: NewFile, flusher: Flusher, proof: Proof) -> None:
    header, order = header_bytes(shard)
    target = flusher.create(path)
    places: dict[str, FileSlice] = {}
    with Handles() as handles:
        write_all(target, header)
        position = len(header)
        for name in order:
            source = shard.tensors[name]
            place = places[name] = FileSlice(path, position, position + source.num_bytes)
            slices: list[FileSlice] = []
            checksum = 0
            for piece in source.pieces():
                if isinstance(piece, FileSlice):
                    copy_range(handles, piece, target, flusher)
                    slices.append(piece)
                    position += piece.num_bytes
                else:
                    write_all(target, piece)
                    checksum = zlib.crc32(piece, checksum)
                    position += len(piece)
                    flusher.advance(target, len(piece))
            if position != place.end:
                wrong = f"produced {position - place.start} bytes, expected {source.num_bytes}"
                raise WriteFailed(f"{name}: {wrong}; this is a bug, please report it")
            if source.is_copy:
                proof.copied(place, name, slices)
            else:
                proof.computed(place, name, checksum)
            rest = padded(position, shard.alignment) - position
            write_all(target, bytes(rest))
            position += rest
    proof.shard(path, shard, places)
    flusher.finish(target)


def _write_document(path: Path, document: Any) -> None:
    if not isinstance(document, str):
        document = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    # Half a surrogate pair is legal as a JSON escape and nowhere else: written back as one.
    data = document.encode("utf-8", errors="backslashreplace")
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _check_space(plan: FolderPlan, folder: Path, out: Path, copying: Copying) -> None:
    """Fail before the long copy; files that will share their blocks are not counted."""
    needed = sum(t.num_bytes for shard in plan.shards.values() for t in shard.tensors.values())
    largest = max(plan.copies.values(), key=_size, default=None)
    if largest is not None and not shares_blocks(largest, folder, copying):
        needed = plan.num_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WriteFailed(
            f"no space: {out} needs {needed / 1e9:.3f} GB and its disk has {free / 1e9:.3f} GB "
            "free. Free some space or choose another --out."
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise WriteFailed(f"{path} cannot be read ({error.strerror}). Run again.") from error
