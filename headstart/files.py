"""Single files: written whole or not at all, and never through a link that lies in their place.

Folders of them are `checkpoint/atomic.py`'s.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Literal


def write_whole(path: Path, data: bytes, *, is_only_writer: bool = False) -> None:
    """Write over an older file; on any failure, which is raised as it comes, that one stays.

    is_only_writer: nobody else writes the file meanwhile. Then what a kill leaves has one name,
    and the next write takes it away.
    """
    partial = partial_of(path)
    if not is_only_writer:
        partial = partial.parent / f"{partial.name}-{secrets.token_hex(4)}"
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as file:  # a new file: not what a link leads to
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def open_no_link(path: Path, mode: Literal["rb", "ab"]) -> BinaryIO:
    """Open a file; OSError (ELOOP) where a link is."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, opener=opener)


def read_plain(path: Path, most_bytes: int = 1 << 28) -> bytes:
    """The content of a file of bounded size; OSError for pipes, devices and larger ones."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for a writer
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        data = b"" if found.st_size > most_bytes else file.read(most_bytes + 1)
        if found.st_size > most_bytes or len(data) > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
        return data


def partial_of(path: Path) -> Path:
    """Where an only writer's file is until it is whole."""
    return path.parent / f".{path.name}.partial"
