"""How the first head walked answers of the base: what later heads are held against.

Kept beside the heads, so that a restart compares with the same head: small losses of one head after
another would add up otherwise. A head that the server is started with instead begins a new file.
A head accepts less where it drafts from a list of tokens, so every list has walks of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.documents import misfit, parse_json
from headstart.files import read_plain, write_whole
from headstart.learn.certainty import Walked

if TYPE_CHECKING:
    from headstart.data.records import Record

_DIGITS = 32  # of a digest


class KnownWalks:
    """Walks by text; without a path they last as long as the process."""

    def __init__(self, path: Path | None = None, vocab_ids: Sequence[int] | None = None):
        """vocab_ids: that the first head drafted from; None: the whole vocabulary."""
        self._path = path
        self._walks = {} if path is None else _read(path)
        self._list = "" if vocab_ids is None else f"{_digest(repr(tuple(vocab_ids)).encode())}-"

    def of(self, records: Sequence[Record], serving: Mapping[str, Walked]) -> dict[str, Walked]:
        """Walks by name of a record; where there is none yet, the serving head's from now on."""
        names = {record.id: self._list + _digest(record.ids.tobytes()) for record in records}
        known = {text: own for text, own in self._walks.items() if text[:-_DIGITS] != self._list}
        known |= {
            text: self._walks.get(text) or replace(serving[name], kind="")  # words of a prompt
            for name, text in names.items()
            if text in self._walks or name in serving
        }
        if known != self._walks:
            self._walks = known
            self._write()
        return {name: known[text] for name, text in names.items() if text in known}

    def _write(self) -> None:
        if self._path is None:
            return
        text = json.dumps({name: asdict(walked) for name, walked in self._walks.items()})
        with contextlib.suppress(OSError):  # a full disk: the next check tries again
            write_whole(self._path, text.encode() + b"\n", is_only_writer=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def _read(path: Path) -> dict[str, Walked]:
    """What is there; nothing where it cannot be read: it is then made anew."""
    try:
        found = parse_json(read_plain(path))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or not all(map(_is_walk, found.values())):
        return {}
    return {name: Walked(**own) for name, own in found.items()}


def _is_walk(found: object) -> bool:
    names = {each.name for each in fields(Walked)}
    return isinstance(found, dict) and set(found) == names and misfit(Walked, found) is None
