"""Where a result came from: written as headstart.json beside it.

Holds the command, versions, sources with digests, and what an operation changed. Formats that lose
information keep what they need to be inverted here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.config import read_json_object
from headstart.errors import BrokenFile

if TYPE_CHECKING:
    from headstart.checkpoint.reader import Checkpoint

PROVENANCE_NAME = "headstart.json"
PROVENANCE_VERSION = 1
_SAMPLE_BYTES = 1 << 16


def provenance(
    operation: str, sources: Iterable[Checkpoint], *, changes: Iterable[str] = (), **details: Any
) -> dict[str, Any]:
    """The document for one result; `details` are facts the reader of the format needs."""
    return {
        "provenance_version": PROVENANCE_VERSION,
        "operation": operation,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "headstart": _version("headstart"),
            "python": platform.python_version(),
        },
        "sources": [{"path": str(source.folder), "digest": digest(source)} for source in sources],
        "changes": list(changes),
        **details,
    }


def read_provenance(folder: Path) -> dict[str, Any]:
    """The provenance of `folder`, or an empty object where Headstart did not write it."""
    path = folder / PROVENANCE_NAME
    return read_json_object(path) if path.is_file() else {}


def digest(checkpoint: Checkpoint) -> str:
    """A quick identity: config, tensor table, and samples of every shard (not all bytes)."""
    state = hashlib.sha256()
    state.update(json.dumps(checkpoint.config.raw, sort_keys=True).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        state.update(f"{name} {info.dtype} {info.shape}\n".encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        try:
            with open(file, "rb", buffering=0) as handle:
                size = os.fstat(handle.fileno()).st_size
                for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                    handle.seek(start)
                    state.update(handle.read(_SAMPLE_BYTES))
        except OSError as error:
            raise BrokenFile(
                f"{file} cannot be read ({error.strerror}). Check the disk, then run again."
            ) from error
    return f"sampled-sha256:{state.hexdigest()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed (run from source)"
