"""Heads that were learned: kept with what they promised and what they held, newest few and best.

`heads.json` is the only record of which one serves; it is replaced whole, after the head's folder
is there whole. So a kill at any moment leaves a head that can be served.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from headstart.documents import misfit, parse_json
from headstart.errors import ConfigError, first_line
from headstart.files import read_plain, write_whole
from headstart.learn.folder import START, Folder

NEWEST = 3  # heads that are kept, beside the best and the one that serves
_LINES = 200  # of the record, the newest ones: it is written anew every minute
State = Literal["ready", "serving", "served", "rolled back", "refused"]


@dataclass
class LearnedHead:
    """One line of the record."""

    name: str
    state: str  # State
    time: float
    promise: dict[str, Any] = field(default_factory=dict)  # a Verdict
    live: dict[str, Any] = field(default_factory=dict)  # what was measured while it served
    note: str = ""  # why it was refused or rolled back

    @property
    def length(self) -> float:
        """Promised acceptance length on recent answers."""
        recent = self.promise.get("recent")
        return float(recent["new"]) if isinstance(recent, dict) and "new" in recent else 0.0


class LearnedHeads:
    """The heads of a folder; one process writes."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self.heads: list[LearnedHead] = _read(folder.record)

    def path(self, name: str) -> Path:
        return self._folder.heads / name

    @property
    def serving(self) -> LearnedHead | None:
        """None: the head that the server was started with."""
        return next((head for head in reversed(self.heads) if head.state == "serving"), None)

    @property
    def before(self) -> str:
        """What would serve if the serving head were taken back."""
        served = [head.name for head in self.heads if head.state == "served"]
        there = [name for name in served if self.path(name).is_dir()]
        return there[-1] if there else START

    def next_name(self) -> str:
        known = [head.name for head in self.heads]
        known += [path.name for path in self._folder.heads.glob("*") if path.is_dir()]
        return f"{1 + max((int(name) for name in known if name.isdigit()), default=0):04d}"

    def add(self, name: str, promise: dict[str, Any]) -> LearnedHead:
        head = LearnedHead(name, "ready", time.time(), promise)
        self.heads.append(head)
        self._write()
        return head

    def serve(self, name: str) -> None:
        """It serves from now on; the record is on disk when this returns."""
        for head in self.heads:
            if head.state == "serving":
                head.state = "served"
            if head.name == name:
                head.state = "serving"
        self._write()
        self._prune()

    def take_back(self, name: str, note: str, state: State = "rolled back") -> None:
        """It does not serve any more, or never did; the one before it serves again."""
        was_serving = self.serving is not None and self.serving.name == name
        before = self.before
        for head in self.heads:
            if head.name == name:
                head.state, head.note = state, note
            elif head.name == before and was_serving:
                head.state = "serving"
        if state == "refused":  # it never served: where every head is refused, none may pile up
            shutil.rmtree(self.path(name), ignore_errors=True)
        self._write()

    def clear_unfinished(self) -> None:
        """Drop what a server left that was killed between writing a head and serving it, and a
        serving head whose folder somebody has removed: the one before it serves."""
        unfinished = [head for head in self.heads if head.state == "ready"]
        for head in unfinished:
            head.state, head.note = "refused", "the server ended before it served"
        serving = self.serving
        with contextlib.suppress(OSError):  # a full disk: a later start finds them again
            if serving is not None and not self.path(serving.name).is_dir():
                self.take_back(serving.name, "its folder is gone", "refused")
            elif unfinished:
                self._write()
        known = {head.name for head in self.heads if head not in unfinished}
        for path in self._folder.heads.glob("*"):
            if path.is_dir() and path.name.isdigit() and path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def begin_anew(self) -> None:
        """None of them serves: the server was started with another head."""
        for head in self.heads:
            head.state = "refused" if head.state in ("ready", "serving", "served") else head.state
        self._write()

    def note_live(self, name: str, live: dict[str, Any]) -> None:
        for head in self.heads:
            if head.name == name:
                head.live = live
        self._write()

    def _write(self) -> None:
        text = json.dumps([asdict(head) for head in self.heads], indent=1) + "\n"
        write_whole(self._folder.record, text.encode(), is_only_writer=True)

    def _prune(self) -> None:
        """Folders of older heads go; their lines stay, the newest of them."""
        usable = [h for h in self.heads if h.state in ("serving", "served")]
        kept = {head.name for head in usable[-NEWEST:]}
        kept |= {max(usable, key=lambda head: head.length).name} if usable else set()
        kept |= {head.name for head in self.heads if head.state == "ready"}
        for head in self.heads:
            if head.name not in kept:
                shutil.rmtree(self.path(head.name), ignore_errors=True)
        newest = {head.name for head in self.heads[-_LINES:]}
        self.heads = [head for head in self.heads if head.name in kept | newest]


def _read(path: Path) -> list[LearnedHead]:
    """What is there; ConfigError where it cannot be read: heads that it names would be removed."""
    try:
        found = parse_json(read_plain(path))
        if not isinstance(found, list) or not all(_is_line(each) for each in found):
            raise ValueError("it is no list of heads as this version writes them")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}, the record of learned heads, cannot be read ({first_line(error)}). Repair "
            "it, or move it away: learning then begins anew and removes the heads beside it."
        ) from None
    return [LearnedHead(**each) for each in found]


def _is_line(found: Any) -> bool:
    names = [each.name for each in fields(LearnedHead)]
    return (
        isinstance(found, dict)
        and sorted(found) == sorted(names)
        and not misfit(LearnedHead, found)
    )
