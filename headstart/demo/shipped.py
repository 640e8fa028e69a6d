"""The tuned head that ships with Headstart, and its draft vocabulary, beside this file."""

from __future__ import annotations

import hashlib
from pathlib import Path

HEAD = Path(__file__).parent / "head"
_VOCAB = "draft_vocab.json"
_DOCUMENTS = {"README.md", "headstart.json"}  # what does not change a token


def shipped_head() -> Path | None:
    """The head's folder; None in a copy of the source that has none."""
    return HEAD if (HEAD / "config.json").is_file() else None


def shipped_vocab() -> Path | None:
    """The head's draft vocabulary."""
    path = HEAD / _VOCAB
    return path if path.is_file() else None


def head_digest(folder: Path | None) -> str:
    """Of everything in the folder that matters for drafting; "" where there is no head."""
    if folder is None:
        return ""
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in _DOCUMENTS:
            state.update(f"{path.name}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()
