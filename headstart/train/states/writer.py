"""Writes a state cache record by record, and goes on where an earlier writer was stopped.

A journal line follows each record's bytes, with the shard's checksum so far. After a kill the
records before the first line that is torn, or that the last shard's bytes do not bear out, are
kept, and the rest is cut off; the index that makes the cache readable is written at the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from headstart.errors import DataError
from headstart.files import partial_of
from headstart.train.states.header import (
    HEADER_NAME,
    INDEX_NAME,
    JOURNAL_NAME,
    CacheHeader,
    canonical,
    check_header,
    encode,
)
from headstart.train.states.journal import (
    Entry,
    journal_line,
    open_plain,
    recover,
    replace_text,
    shard_name,
)

DEFAULT_SHARD_BYTES = 2**30
LOCK_NAME = "lock"


class CacheWriter:
    """Fills a cache folder; `finish` makes it readable. An unfinished one can be opened again."""

    def __init__(
        self, folder: Path, header: CacheHeader, *, shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        self.folder, self.header, self.shard_bytes = folder, header, shard_bytes
        self._files = ExitStack()
        try:
            with self._files:
                self._check_folder()
                self._lock()
                self._check_folder()  # again: the lock's last holder may have finished
                self._entries = self._go_on()
                last = next(reversed(self._entries.values()), Entry("", 0, 0, 0, 0, 0))
                self._shard, self._end, self._crc32 = last.shard, last.end, last.crc32
                self._file = self._open(shard_name(self._shard))
                self._journal = self._open(JOURNAL_NAME)
                self._files = self._files.pop_all()
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written ({error.strerror}). Give another --cache folder."
            ) from error

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, record_id: str, states: Tensor) -> None:
        """Store a record's states [T, D], from any device and in any floating dtype."""
        if record_id in self._entries:
            raise DataError(f"record {record_id} is in {self.folder} already; add each one once")
        if states.ndim != 2 or states.shape[1] != self.header.hidden_size or not len(states):
            raise DataError(
                f"record {record_id} has states {tuple(states.shape)}; expected "
                f"[1 token or more, {self.header.hidden_size}], the cache's hidden size"
            )
        if not bool(torch.isfinite(states).all()):
            raise DataError(
                f"record {record_id} has states that are not finite; the trunk cannot be trusted "
                f"on it. Check the checkpoint, or leave the record out."
            )
        try:
            self._store(record_id, states)
        except OSError as error:
            self.close()
            raise DataError(
                f"record {record_id} could not be written to {self.folder} ({error.strerror}). "
                f"Make room and run again: it goes on where it stopped."
            ) from error

    def _store(self, record_id: str, states: Tensor) -> None:
        if self._end >= self.shard_bytes:
            self._next_shard()
        offset = self._end
        for part in encode(states.detach(), self.header.dtype):
            self._write(part.view(torch.uint8).view(-1).numpy().data)
        entry = Entry(record_id, self._shard, offset, len(states), self._end, self._crc32)
        self._file.flush()
        self._journal.write(journal_line(entry).encode())
        self._journal.flush()
        self._entries[record_id] = entry

    def finish(self) -> None:
        """Make the cache readable. The writer is closed."""
        self._sync()
        ends = {entry.shard: entry for entry in self._entries.values()}
        document = {
            "shards": [
                {"file": shard_name(number), "bytes": entry.end, "crc32": entry.crc32}
                for number, entry in sorted(ends.items())
            ],
            "records": {
                entry.id: [entry.shard, entry.offset, entry.num_tokens]
                for entry in self._entries.values()
            },
        }
        text = json.dumps({**document, "crc32": zlib.crc32(canonical(document))})
        replace_text(self.folder / INDEX_NAME, [text])
        self.close()
        (self.folder / JOURNAL_NAME).unlink()
        (self.folder / LOCK_NAME).unlink()

    def close(self) -> None:
        """Stop without finishing: another writer can go on later."""
        # What cannot be flushed is no loss: without its journal line it does not count.
        with suppress(OSError):
            self._files.close()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self._end += len(data)
        self._crc32 = zlib.crc32(data, self._crc32)

    def _next_shard(self) -> None:
        self._sync()
        self._file.close()
        self._shard, self._end, self._crc32 = self._shard + 1, 0, 0
        self._file = self._open(shard_name(self._shard))

    def _sync(self) -> None:
        """A shard that is left is safe on disk, so that resuming need only look at the last."""
        for file in (self._file, self._journal):
            file.flush()
            os.fsync(file.fileno())

    def _open(self, name: str) -> BinaryIO:
        return self._files.enter_context(open_plain(self.folder / name, "ab"))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._open(LOCK_NAME), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.folder} is being written by another process. Wait for it, or give another "
                f"--cache folder."
            ) from error

    def _check_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in self.folder.iterdir()}
        if INDEX_NAME in names:
            raise DataError(
                f"{self.folder} holds a finished state cache; expected none, or an unfinished one. "
                f"Use it, give another --cache folder, or remove this one."
            )
        # All that a writer makes before the header.
        others = names - {LOCK_NAME, partial_of(self.folder / HEADER_NAME).name}
        if others and HEADER_NAME not in names:
            raise DataError(
                f"{self.folder} holds {min(others)} and no {HEADER_NAME}; expected an empty folder "
                f"or a state cache. Give another --cache folder."
            )

    def _go_on(self) -> dict[str, Entry]:
        """What an earlier writer left; nothing, and a header, in a new folder."""
        if not (self.folder / HEADER_NAME).exists():
            replace_text(self.folder / HEADER_NAME, [self.header.document()])
        check_header(self.folder, self.header)
        return {entry.id: entry for entry in recover(self.folder)}
