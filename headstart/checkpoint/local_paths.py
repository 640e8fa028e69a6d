"""Paths of this machine in what is given to others: as they are, or the last part of each.

Results carry where they came from, and servers say what they serve. With `--hide-paths`, or
HEADSTART_HIDE_PATHS in the environment, neither tells how folders of this machine are called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "HEADSTART_HIDE_PATHS"
# Names of folders may hold blanks, but not end with one: there another path begins.
_FOLDER = r"[^\s/'\"](?:[^/'\"\n]*[^\s/'\"])?/"
_ABSOLUTE = re.compile(rf"(?<![\w./:])/(?:{_FOLDER})*([^\s/'\"]+)")


def are_hidden() -> bool:
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def shown(path: str | Path) -> str:
    """A path as others may see it; a name that is no path of this machine stays as it is."""
    text = str(path)
    if not are_hidden() or not ("/" in text and _is_here(text)):
        return text
    return Path(text).name or "."


def shown_words(words: Sequence[str]) -> list[str]:
    """The words of a command; also `--option=path`."""
    if not are_hidden():
        return list(words)
    parts = [word.rpartition("=") if word.startswith("-") else ("", "", word) for word in words]
    return [f"{option}{sign}{shown(value)}" for option, sign, value in parts]


def without_paths(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document whose texts hold no absolute path, where paths are hidden."""
    if not are_hidden():
        return dict(document)
    return {name: _cleared(value) for name, value in document.items()}


def _cleared(value: Any) -> Any:
    if isinstance(value, str):
        return _ABSOLUTE.sub(r"\1", value)
    if isinstance(value, Mapping):
        return {name: _cleared(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cleared(inner) for inner in value]
    return value


def _is_here(text: str) -> bool:
    """Whether it means a place on this machine: a Hugging Face name has a slash as well."""
    return text.startswith(("/", "./", "../", "~")) or os.path.lexists(text)
