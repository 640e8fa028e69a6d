"""Single files that appear whole or not at all; folders of them are `checkpoint/atomic.py`'s."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes, *, is_only_writer: bool = False) -> None:
    """Write over an older file; on any failure, which is raised as it comes, that one stays.

    is_only_writer: nobody else writes the file meanwhile. Then what a kill leaves has one name,
    and the next write takes it away.
    """
    partial = partial_of(path)
    if not is_only_writer:
        partial = partial.parent / f"{partial.name}-{secrets.token_hex(4)}"
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_of(path: Path) -> Path:
    """Where an only writer's file is until it is whole."""
    return path.parent / f".{path.name}.partial"
