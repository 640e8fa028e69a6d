"""Symbolic links in a checkpoint: which may be followed when its files go into a result.

An untrusted folder may hold `LICENSE -> ~/.ssh/id_rsa`. What a link leads to is copied as
content, so it must lie in the folder itself, or in the blobs of the hub cache that the folder is
a snapshot of (`models--x/snapshots/REVISION/file -> ../../blobs/HASH`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from headstart.errors import CheckpointError


def followed_links(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Those of the files in `folder` that are links, with what they lead to, relative to it.

    CheckpointError where that lies outside.
    """
    base = Path(os.path.realpath(folder))
    roots = [base, *_blobs(base)]
    found: dict[str, Path] = {}
    for name in names:
        real = Path(os.path.realpath(folder / name))
        if real == base / name:
            continue
        if not any(real.is_relative_to(root) for root in roots):
            raise CheckpointError(
                f"{folder / name} is a link to {real}, outside the checkpoint; it would end in the "
                "result as a file. Put a copy of the file in its place if it belongs there, or "
                "remove the link."
            )
        found[name] = Path(os.path.relpath(real, base))
    return found


def _blobs(snapshot: Path) -> list[Path]:
    """Where a hub cache keeps the content of a snapshot; not resolved, for it may be a link."""
    cache = snapshot.parent.parent
    is_snapshot = snapshot.parent.name == "snapshots" and cache.name.startswith("models--")
    return [cache / "blobs"] if is_snapshot else []
