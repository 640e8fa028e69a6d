"""Reads a just-written folder back and compares it with what it was made from.

A result is only installed after every tensor was found under its name with its dtype, shape and
bytes: those copied are compared with their source, those computed with the checksum taken as they
were written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.checkpoint.compare import as_slice, checksum, equal_slices
from headstart.checkpoint.header import read_header
from headstart.checkpoint.source import FileSlice
from headstart.errors import WriteFailed

if TYPE_CHECKING:
    from headstart.checkpoint.writer import Shard


def prove(
    folder: Path,
    shards: Mapping[str, Shard],
    copies: Mapping[str, Path],
    checksums: Mapping[tuple[str, str], int],
) -> None:
    """Raise WriteFailed unless `folder` holds exactly what the plan says."""
    for name, shard in shards.items():
        header = read_header(folder / name)
        expected = {key: (source.dtype, source.shape) for key, source in shard.tensors.items()}
        found = {key: (info.dtype, info.shape) for key, info in header.tensors.items()}
        if expected != found:
            raise WriteFailed(f"{name}: read back other tensors than were written")
        for key, source in shard.tensors.items():
            info = header.tensors[key]
            if source.is_copy:
                pieces = [piece for piece in source.pieces() if isinstance(piece, FileSlice)]
                same = equal_slices(as_slice(info), pieces)
            else:
                same = checksums[name, key] == checksum(as_slice(info))
            if not same:
                raise WriteFailed(f"{name}: {key} does not read back as written; check the disk")
    for name, source_file in copies.items():
        target = folder / name
        if os.path.samefile(target, source_file):
            continue
        sizes = (target.stat().st_size, source_file.stat().st_size)
        whole = FileSlice(source_file, 0, sizes[1])
        if sizes[0] != sizes[1] or not equal_slices(FileSlice(target, 0, sizes[0]), [whole]):
            raise WriteFailed(f"{name} does not read back as {source_file}; check the disk")
