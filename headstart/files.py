"""Single files: written whole or not at all, and never through a link that lies in their place.

Folders of them are `checkpoint/atomic.py`'s.
"""

from __future__ import annotations

import os
import secrets
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


def partial_of(path: Path) -> Path:
    """Where an only writer's file is until it is whole."""
    return path.parent / f".{path.name}.partial"
