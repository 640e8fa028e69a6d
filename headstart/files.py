"""Single files: written whole or not at all, and never through a link that lies in their place.

Folders of them are `checkpoint/atomic.py`'s.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal


def write_whole(path: Path, data: bytes, *, is_only_writer: bool = False) -> None:
    """Write over an older file; on any failure, which is raised as it comes, that one stays.

    is_only_writer: no other process writes the file meanwhile. What a kill leaves is taken away by
    the next write: it has one name, or is not locked any more.
    """
    partial = partial_of(path)
    if is_only_writer:
        partial.unlink(missing_ok=True)
    else:
        _clear_abandoned(partial)
        partial = partial.parent / f"{partial.name}-{secrets.token_hex(4)}"
    try:
        with _new_file(partial) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)  # before the lock ends, which keeps others from removing it
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _new_file(path: Path) -> BinaryIO:
    """A new file, not what a link leads to, and locked: another writer leaves it alone."""
    while True:
        file = path.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # else another writer took the still unlocked file for an abandoned one
            return file
        file.close()


def _clear_abandoned(partial: Path) -> None:
    """Remove what killed writers left; a file that is being written is locked."""
    pattern = re.compile(rf"{re.escape(partial.name)}-[0-9a-f]{{8}}")
    try:
        names = [name for name in os.listdir(partial.parent) if pattern.fullmatch(name)]
    except OSError:  # a folder that may be written and not listed
        return
    for stale in (partial.parent / name for name in names):
        try:
            with open_no_link(stale, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink(missing_ok=True)
        except OSError:
            continue  # being written, removed by another run just now, or nothing that we made


def open_no_link(path: Path, mode: Literal["rb", "ab"]) -> BinaryIO:
    """Open a file; OSError (ELOOP) where a link is."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, opener=opener)


def read_plain(path: Path, most_bytes: int = 1 << 28) -> bytes:
    """The content of a file of bounded size; OSError for pipes, devices and larger ones."""
    with _open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most_bytes else file.read(most_bytes + 1)
        if size > most_bytes or len(data) > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
        return data


def read_text(path: Path, most_bytes: int = 1 << 28) -> str:
    """The same as text, all of whose lines end in a line feed; ValueError where it is not UTF-8."""
    text = read_plain(path, most_bytes).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def why_unreadable(error: OSError | ValueError) -> str:
    """What kept a file from being read as text or JSON, in words, without the file's name."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def plain_lines(path: Path, most_bytes: int = 1 << 28) -> Iterator[bytes]:
    """The lines of a file of any size, as they end; OSError for pipes, devices and longer lines."""
    with _open_plain(path) as file:
        while line := file.readline(most_bytes + 1):
            if len(line) > most_bytes:
                what = f"it has a line of more than {most_bytes:,} bytes"
                raise OSError(errno.EFBIG, what, str(path))
            yield line


def _open_plain(path: Path) -> BinaryIO:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return open(handle, "rb")


def partial_of(path: Path) -> Path:
    """Where an only writer's file is until it is whole."""
    return path.parent / f".{path.name}.partial"
