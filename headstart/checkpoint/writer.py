"""Writes a checkpoint folder from a plan: new shards, copied files, small documents.

Bytes go from file to file inside the kernel where the system allows it; only computed tensors
pass through memory, piece by piece. Finished parts are flushed while the next ones are written,
everything is read back and compared (`checkpoint/proof.py`) while the last flush runs, and the
folder appears under its name only after that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headstart.checkpoint.atomic import building, check_target
from headstart.checkpoint.header import DTYPE_BITS
from headstart.checkpoint.proof import prove
from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.errors import WriteFailed

Copying = Literal["copy", "link"]
Report = Callable[[int], None]
DEFAULT_SHARD_BYTES = 5_000_000_000
_FLUSH_BYTES = 128 << 20
_FICLONE = 0x40049409
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


@dataclass(frozen=True)
class Shard:
    """A new safetensors file."""

    tensors: Mapping[str, TensorSource]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


@dataclass(frozen=True)
class FolderPlan:
    """Everything a result folder will hold, by file name."""

    shards: Mapping[str, Shard] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)  # str as it is, else JSON

    @property
    def num_bytes(self) -> int:
        new = sum(t.num_bytes for shard in self.shards.values() for t in shard.tensors.values())
        return new + sum(path.stat().st_size for path in self.copies.values())


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
    check_target(out, overwrite=overwrite, inputs=inputs)
    with building(out) as folder, _Flusher(report) as flusher:
        _check_space(plan, folder, out)
        checksums: dict[tuple[str, str], int] = {}
        for name, shard in plan.shards.items():
            checksums.update(_write_shard(folder / name, shard, flusher))
        for name, source in plan.copies.items():
            _copy_file(source, folder / name, copying, flusher)
        for name, document in {**plan.documents, PROVENANCE_NAME: provenance}.items():
            _write_document(folder / name, document)
        prove(folder, plan.shards, plan.copies, checksums)


def index_document(weight_map: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """The index that engines read, with the total they check downloads by."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


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


def header_bytes(shard: Shard) -> tuple[bytes, list[str]]:
    """The header of a new file, and the order in which its tensors follow."""
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


class _Flusher:
    """Counts written bytes and flushes them in the background, so the end need not wait long.

    Leaving the context waits for all flushes and raises what any of them met.
    """

    def __init__(self, report: Report):
        self._report = report
        self._pool = ThreadPoolExecutor(1)
        self._flushes: list[Future[None]] = []
        self._unflushed = 0

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            for flush in self._flushes:
                flush.result()

    def advance(self, target: int, num_bytes: int) -> None:
        self._report(num_bytes)
        self._unflushed += num_bytes
        if self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            self._flushes.append(self._pool.submit(os.fdatasync, target))

    def finish(self, target: int) -> None:
        self._flushes.append(self._pool.submit(_sync_and_close, target))


def _sync_and_close(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_shard(path: Path, shard: Shard, flusher: _Flusher) -> dict[tuple[str, str], int]:
    header, order = header_bytes(shard)
    checksums: dict[tuple[str, str], int] = {}
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    sources: dict[Path, int] = {}
    try:
        _write_all(target, header)
        for name in order:
            checksum, size = 0, 0
            for piece in shard.tensors[name].pieces():
                if isinstance(piece, FileSlice):
                    if piece.file not in sources:
                        sources[piece.file] = os.open(piece.file, os.O_RDONLY)
                    _copy_range(sources[piece.file], target, piece.start, piece.num_bytes, flusher)
                    size += piece.num_bytes
                else:
                    _write_all(target, piece)
                    checksum = zlib.crc32(piece, checksum)
                    size += len(piece)
                    flusher.advance(target, len(piece))
            if size != shard.tensors[name].num_bytes:
                expected = shard.tensors[name].num_bytes
                raise WriteFailed(f"{name}: produced {size} bytes, expected {expected}")
            if not shard.tensors[name].is_copy:
                checksums[path.name, name] = checksum
    finally:
        for handle in sources.values():
            os.close(handle)
        flusher.finish(target)
    return checksums


def _write_all(target: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(target, view) :]


def _copy_range(source: int, target: int, start: int, count: int, flusher: _Flusher) -> None:
    """Copy inside the kernel; by read and write where the file systems do not support that."""
    while count:
        step = min(count, _FLUSH_BYTES)
        try:
            done = os.copy_file_range(source, target, step, offset_src=start)
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
            done = 0
        if done == 0:
            data = os.pread(source, min(step, 1 << 22), start)
            if not data:
                raise WriteFailed("a source file became shorter while it was read")
            _write_all(target, data)
            done = len(data)
        start, count = start + done, count - done
        flusher.advance(target, done)


def _copy_file(source: Path, target: Path, copying: Copying, flusher: _Flusher) -> None:
    real = source.resolve()  # hub caches hold links; a result holds files
    if copying == "link":
        try:
            os.link(real, target)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    origin = os.open(real, os.O_RDONLY)
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            fcntl.ioctl(handle, _FICLONE, origin)
        except OSError:
            _copy_range(origin, handle, 0, os.fstat(origin).st_size, flusher)
    finally:
        os.close(origin)
        flusher.finish(handle)


def _write_document(path: Path, document: Any) -> None:
    if not isinstance(document, str):
        document = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(document)
        handle.flush()
        os.fsync(handle.fileno())


def _check_space(plan: FolderPlan, folder: Path, out: Path) -> None:
    """Fail before the long copy; copies that may be links or reflinks are not counted."""
    needed = sum(t.num_bytes for shard in plan.shards.values() for t in shard.tensors.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WriteFailed(
            f"{out} needs {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free. "
            "Free some space or choose another --out."
        )
