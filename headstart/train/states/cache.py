"""Reads a finished state cache through memory maps.

A cache is opened only when it is finished, its header is the expected one, and its bytes are those
that were written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.errors import DataError, some
from headstart.train.states.header import (
    HEADER_NAME,
    INDEX_NAME,
    CacheHeader,
    canonical,
    check_header,
    damaged,
    decode,
    disk_bill,
    read_object,
)
from headstart.train.states.journal import open_plain, shard_name

_READ_BYTES = 2**24
_NUM_THREADS = 4  # checksums release the interpreter's lock; more outruns most disks


class StateCache:
    """Cached states by record id."""

    def __init__(self, folder: Path, header: CacheHeader, index: dict[str, Any]) -> None:
        self.folder, self.header = folder, header
        self._records: dict[str, list[int]] = index["records"]
        self._shards: list[dict[str, Any]] = index["shards"]
        self._maps: dict[int, Tensor] = {}

    @classmethod
    def open(cls, folder: Path, expected: CacheHeader, *, verify: bool = True) -> StateCache:
        """The cache in `folder`. verify=False skips the checksums of the shards: for the other
        processes of a run of which one has verified."""
        check_header(folder, expected)
        if not (folder / INDEX_NAME).exists():
            raise DataError(
                f"{folder} is unfinished: it has no {INDEX_NAME}, which is written last. Run the "
                f"command that filled it again: it goes on where it stopped."
            )
        index = read_object(folder / INDEX_NAME)
        checksum = index.pop("crc32", None)
        if checksum != zlib.crc32(canonical(index)):
            raise damaged(folder / INDEX_NAME, "does not agree with its checksum")
        _check_shards(folder, index)
        cache = cls(folder, expected, index)
        cache._check_sizes()
        if verify:
            cache._check_bytes()
        return cache

    @staticmethod
    def is_finished(folder: Path) -> bool:
        """Whether `folder` holds a cache that `open` would read."""
        return (folder / HEADER_NAME).exists() and (folder / INDEX_NAME).exists()

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def num_tokens(self, record_id: str) -> int:
        return self._place(record_id)[2]

    def states(self, record_id: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """A record's states [T, D] on the CPU.

        A view of the file where it is stored in `dtype`; writing into it changes neither the file
        nor other views.
        """
        shard, offset, num_tokens = self._place(record_id)
        size = disk_bill(num_tokens, self.header.hidden_size, self.header.dtype)
        stored = self._map(shard)[offset : offset + size]
        return decode(stored, self.header, num_tokens, dtype)

    def _place(self, record_id: str) -> list[int]:
        if record_id not in self._records:
            raise DataError(
                f"{self.folder} has no states of record {record_id}; it holds {len(self)}: "
                f"{some(self._records)}. The cache belongs to other data: remove it and run again."
            )
        return self._records[record_id]

    def _map(self, shard: int) -> Tensor:
        if shard not in self._maps:
            path = self.folder / self._shards[shard]["file"]
            size = self._shards[shard]["bytes"]
            self._maps[shard] = torch.from_file(
                str(path), shared=False, size=size, dtype=torch.uint8
            )
        return self._maps[shard]

    def _check_sizes(self) -> None:
        # A map of a file that is too short would end the process when its end is touched.
        for shard in self._shards:
            path = self.folder / shard["file"]
            if path.is_symlink():
                raise damaged(path, "is a link, not a file of the cache")
            size = path.stat().st_size if path.exists() else 0
            if size != shard["bytes"]:
                raise damaged(path, f"has {size} bytes, expected {shard['bytes']}")

    def _check_bytes(self) -> None:
        paths = [self.folder / shard["file"] for shard in self._shards]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for path, shard, found in zip(
                paths, self._shards, pool.map(_checksum, paths), strict=True
            ):
                if found != shard["crc32"]:
                    raise damaged(path, f"has checksum {found}, expected {shard['crc32']}")


def _check_shards(folder: Path, index: dict[str, Any]) -> None:
    """Refuse names that lead elsewhere: neither an index nor its checksum is trusted."""
    shards, records = index.get("shards"), index.get("records")
    if not isinstance(shards, list) or not isinstance(records, dict):
        raise damaged(folder / INDEX_NAME, "lists no shards and records")
    for number, shard in enumerate(shards):
        name = shard.get("file") if isinstance(shard, dict) else shard
        if name != shard_name(number):
            raise damaged(
                folder / INDEX_NAME, f"names shard {name!r}, expected {shard_name(number)}"
            )


def _checksum(path: Path) -> int:
    crc32 = 0
    with open_plain(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            crc32 = zlib.crc32(data, crc32)
    return crc32
