"""The trunk's states of texts on disk: those that a server had at hand when it answered.

A file holds one entry after another: a line of JSON that says whose states they are, then the rows
in bf16. Files are only appended to. A kill leaves at most one unfinished entry, at the end of a
file; a checksum says whether an entry is what was written. What cannot be read is computed again.
States may take what texts leave of the room: the oldest files make room, served ones first.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headstart.documents import misfit, parse_json
from headstart.learn.appending import Appender, number_of, size_of
from headstart.learn.folder import STATES
from headstart.models.unroll import StateKind

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.learn.folder import Folder

SERVED, BASE = "served", "base"
_FILE_BYTES = 16 << 20
_LONGEST_LINE = 1 << 12
_BASE_SHARE = 0.5  # of the room, for states of the base
_LOOK_SECONDS = 1.0  # between two looks for what was written meanwhile


@dataclass(frozen=True)
class Entry:
    """The line before the rows."""

    id: str  # of the text
    kind: str  # which state of the trunk
    rows: int
    width: int
    crc32: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * torch.bfloat16.itemsize

    @classmethod
    def read(cls, line: bytes) -> Entry | None:
        """None for what is no line of ours."""
        try:
            found = parse_json(line)
        except ValueError:
            return None
        names = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or set(found) != names or misfit(cls, found):
            return None
        entry = cls(**found)
        return entry if entry.rows > 0 and entry.width > 0 else None


class StateWriter:
    """Appends states; belongs to one thread. OSError where the disk does not take them."""

    def __init__(self, folder: Folder, name: str, max_bytes: int):
        """name: SERVED, or BASE and what tells one base from others. max_bytes: for everything."""
        self._folder, self._name, self._max_bytes = folder, name, max_bytes
        size = min(_FILE_BYTES, max_bytes // 16)
        self._appender = Appender(folder.states, name, STATES, size)
        self._used, self._looked = 0, -_LOOK_SECONDS

    def add(self, text_id: str, kind: StateKind, states: Tensor) -> int:
        """Write the states [n, D] of a text; returns bytes, 0 where there is no room."""
        rows = states.detach().to("cpu", torch.bfloat16).contiguous()
        data = rows.view(torch.uint8).numpy().tobytes()
        entry = Entry(text_id, kind, len(rows), rows.shape[1], zlib.crc32(data))
        line = json.dumps(asdict(entry), separators=(",", ":")).encode() + b"\n"
        if len(line) > _LONGEST_LINE or not self.make_room(len(line) + len(data)):
            return 0
        added = self._appender.append([line, data])
        self._used += added
        return added

    def make_room(self, needed: int = 0) -> bool:
        """Whether so many bytes fit beside everything else; older served states may have to go.

        Where texts alone take the room, all states go.
        """
        if self._name != SERVED:
            own = sum(map(size_of, self._folder.states.glob(f"{BASE}-*{STATES}")))
            has_share = own + needed <= _BASE_SHARE * self._max_bytes
            return has_share and self._used_bytes() + needed <= self._max_bytes
        left = self._max_bytes - self._used_bytes() - needed
        files = sorted(self._folder.states.glob(f"*{STATES}"), key=_age) if left < 0 else []
        if needed:  # states of one text are worth older served ones, not those of the base
            files = [path for path in files if path.name.startswith(f"{SERVED}-")]
            if left + sum(map(size_of, files)) < 0:
                return False
        for path in files:
            size = size_of(path)
            left, self._used = left + size, self._used - size
            if path == self._appender.path:
                self._appender.close()
            path.unlink(missing_ok=True)
            if left >= 0:
                break
        return left >= 0

    def _used_bytes(self) -> int:
        """As of a second ago, with what was added here since: a look at every file takes long."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._used, self._looked = used_bytes(self._folder), now
        return self._used

    def close(self) -> None:
        self._appender.close()


class StoredStates:
    """What is in a folder, for one reader; files may come and go meanwhile."""

    def __init__(self, folder: Path, kind: StateKind, width: int):
        """kind, width: of the states that are wanted; others are passed over."""
        self._folder, self._kind, self._width = folder, kind, width
        self._entries: dict[str, tuple[Path, int, Entry]] = {}  # by text: file, place of the rows
        self._read: dict[str, int] = {}  # file name -> bytes that were read
        self._looked = -_LOOK_SECONDS

    def has(self, record: Record) -> bool:
        """Whether there are states of a text, which may be cut; damage shows when they are read."""
        if not self._knows(record):
            self._look()
        return self._knows(record)

    def _knows(self, record: Record) -> bool:
        found = self._entries.get(record.id)
        return found is not None and found[2].rows >= len(record.ids) - 1

    def find(self, record: Record) -> Tensor | None:
        """[T, D] in bf16 of a text, which may be cut; None where there are none, or damaged ones.

        The last token of an answer has none, and nothing is learned from its: zeros stand there.
        """
        if not self.has(record):
            return None
        path, place, entry = self._entries[record.id]
        num_tokens = len(record.ids)
        data = _bytes_at(path, place, entry.num_bytes)
        if zlib.crc32(data) != entry.crc32:
            del self._entries[record.id]
            return None
        states = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, entry.width)
        if not bool(torch.isfinite(states).all()):
            del self._entries[record.id]
            return None
        missing = max(0, num_tokens - entry.rows)
        return torch.cat([states[:num_tokens], states.new_zeros(missing, entry.width)])

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            files = sorted(self._folder.glob(f"*{STATES}"))
            self._forget(self._read.keys() - {path.name for path in files})
            for path in files:
                self._read_lines(path)

    def _forget(self, gone: set[str]) -> None:
        """Files that have made room: a server that runs for long writes and removes many."""
        if gone:
            self._read = {name: place for name, place in self._read.items() if name not in gone}
            self._entries = {n: own for n, own in self._entries.items() if own[0].name not in gone}

    def _read_lines(self, path: Path) -> None:
        place, size = self._read.get(path.name, 0), size_of(path)
        if place >= size:
            return
        try:
            with open(path, "rb") as file:
                while place < size:
                    file.seek(place)
                    line = file.readline(_LONGEST_LINE)
                    if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                        break  # it is being written, or a kill cut it off
                    entry = Entry.read(line)
                    if entry is None:  # damaged: where the next one begins is not known
                        place = 1 << 62
                        break
                    start = place + len(line)
                    if start + entry.num_bytes > size:
                        break
                    if (entry.kind, entry.width) == (self._kind, self._width):
                        self._entries[entry.id] = (path, start, entry)
                    place = start + entry.num_bytes
        except OSError:  # it has made room
            return
        self._read[path.name] = place


def used_bytes(folder: Folder) -> int:
    """Of texts and states."""
    files = [*folder.texts.glob("*.jsonl"), *folder.states.glob(f"*{STATES}")]
    return sum(map(size_of, files))


def remove_bases(folder: Folder, name: str | None) -> None:
    """Those of other bases than the one called so."""
    for path in folder.states.glob(f"{BASE}-*{STATES}"):
        if path.stem.rpartition("-")[0] != name:
            path.unlink(missing_ok=True)


def _age(path: Path) -> tuple[bool, int]:
    """What makes room first: served states, the oldest first."""
    return path.name.startswith(f"{BASE}-"), number_of(path)


def _bytes_at(path: Path, place: int, count: int) -> bytes:
    """Nothing of a file that is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(place)
            return file.read(count)
    except OSError:
        return b""
