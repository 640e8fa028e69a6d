"""Files that are only appended to: what a kill leaves is whole, but for the end of the last one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Self


class Appender:
    """Writes entries into `folder/name-N suffix`; belongs to one thread.

    OSError where the disk does not take them: then nothing of them is left.
    """

    def __init__(self, folder: Path, name: str, suffix: str, file_bytes: int):
        """file_bytes: from which on the next file begins."""
        self._folder, self._name, self._suffix = folder, name, suffix
        self._file_bytes = file_bytes
        self._file: FileIO | None = None
        self._number = 0  # of the newest file; a name is not used twice, as readers go by names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def path(self) -> Path | None:
        """Of the file that is being written."""
        return None if self._file is None else Path(os.fsdecode(self._file.name))

    def append(self, parts: Iterable[bytes]) -> int:
        """Write all, and let the system have them; returns bytes."""
        file: FileIO | None = None
        start = total = 0
        for part in filter(None, parts):
            if file is None:
                file = self._current()
                start = file.tell()
            try:
                _write_all(file, part)
            except OSError:
                self._cut(file, start)
                raise
            total += len(part)
        return total

    def begin(self) -> None:
        """Have a file, so that older ones are known to be done."""
        self._current()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _current(self) -> FileIO:
        file = self._file
        if file is not None and (
            file.tell() > self._file_bytes
            or os.fstat(file.fileno()).st_nlink == 0  # another process has removed it
        ):
            os.fsync(file.fileno())
            self.close()
        if self._file is None:
            older = self._folder.glob(f"{self._name}-*{self._suffix}")
            self._number = 1 + max([self._number, *map(number_of, older)])
            path = self._folder / f"{self._name}-{self._number:08d}{self._suffix}"
            # Unbuffered: what `write` has returned for is the system's, whatever kills us.
            self._file = open(path, "xb", buffering=0, opener=_own)  # noqa: SIM115
        return self._file

    def _cut(self, file: FileIO, length: int) -> None:
        """Take back half a batch, so that the next one does not begin inside an entry."""
        try:
            file.truncate(length)
            file.seek(length)
        except OSError:
            self.close()  # the next batch goes into a file of its own


def number_of(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def size_of(path: Path) -> int:
    """0 for a file that is gone meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _own(path: str, flags: int) -> int:
    """Readable by its owner alone, wherever the folder is copied to."""
    return os.open(path, flags, 0o600)


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
