"""Served texts on disk: files that are only appended to, and thinned files of older ones.

The server writes `served-N.jsonl`; the learner reads all of them, and when there is too much it
writes what stays into files `packed-N.jsonl` and removes those that went into them, a few at a
time. A kill at any moment loses at most the texts that were not written yet; a text that is in two
files counts once.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headstart.files import write_whole
from headstart.learn.appending import Appender, number_of, size_of
from headstart.learn.texts import read_line

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.learn.texts import Text

Name = TypeVar("Name")
_FILE_BYTES = 4 << 20
_FILES = 16  # at least, of a full store: the newest one is not thinned out
_FULL, _THINNED = 0.9, 0.7  # of the space: when texts are thinned out, and to how much
_HALVINGS = 5  # of the time that a kind's texts are spread over,
_FEWEST = 8  # as long as so many stay
_ID = re.compile(rb'\{"id":"([^"\\]*)"')  # how our lines begin


class TextWriter(Appender):
    """Appends texts; belongs to one thread of the server. OSError where the disk does not take."""

    def __init__(self, folder: Path, max_bytes: int = _FILES * _FILE_BYTES):
        """max_bytes: of the store."""
        super().__init__(folder, "served", ".jsonl", min(_FILE_BYTES, max_bytes // _FILES))

    def add(self, texts: Iterable[Text]) -> int:
        """Write texts, and let the system have them; returns bytes."""
        return self.append([b"".join(text.line() for text in texts)])


@dataclass(eq=False)
class KeptText:
    """A text in memory."""

    record: Record
    time: float  # never later than when it was read, whatever a clock said
    is_heldout: bool
    draw: float
    num_bytes: int  # on disk
    is_useful: bool | None = None  # whether anything can be learned from it; None: not known yet


@dataclass
class Store:
    """All texts of a folder, as a reader has them; `refresh` adds what was written meanwhile."""

    folder: Path
    max_bytes: int
    texts: dict[str, KeptText] = field(default_factory=dict)
    num_bytes: int = 0
    _read: dict[str, int] = field(default_factory=dict)  # file name -> bytes that were read

    def refresh(self) -> list[KeptText]:
        """Read new lines; returns the texts that are new."""
        files = sorted(self.folder.glob("*.jsonl"))
        return [text for path in files for text in self._read_file(path)]

    def split(self, *, is_heldout: bool) -> list[KeptText]:
        """Useful ones of one side, oldest first."""
        found = [t for t in self.texts.values() if t.is_heldout == is_heldout and t.is_useful]
        return sorted(found, key=lambda text: text.time)

    def thin(self) -> int:
        """Where there are too many, keep an even sample; returns how many were dropped.

        OSError where the disk takes no more: what is left is whole, and a later call goes on.

        The newest served file is the writer's: it stays as it is.
        """
        files = sorted(self.folder.glob("*.jsonl"))
        newest = [path for path in files if path.name.startswith("served-")][-1:]
        done = [path for path in files if path not in newest]
        # On disk, where a kill may have left what was packed twice.
        sizes = [sum(map(size_of, part)) for part in (files, done)]
        if sizes[0] <= _FULL * self.max_bytes or sizes[1] <= _THINNED * self.max_bytes:
            return 0
        dropped = self.texts.keys() - even_sample(self.texts, int(_THINNED * self.max_bytes))
        dropped -= {name for path in newest for name, _ in _lines(path)}
        self.refresh()  # what came meanwhile stays
        before = len(self.texts)
        self._pack(done, dropped)
        return before - len(self.texts)

    def _pack(self, files: list[Path], dropped: set[str]) -> None:
        """Write what stays of these into new files, a few megabytes at a time."""
        number = max(
            (number_of(path) for path in files if path.name.startswith("packed-")), default=0
        )
        file_bytes = min(_FILE_BYTES, self.max_bytes // _FILES)
        part, done, gone = dict[str, bytes](), list[Path](), set[str]()
        packed = set[str]()
        for path in files:
            for name, line in _lines(path):
                if name in dropped:
                    gone.add(name)
                elif name in self.texts and name not in packed:
                    part[name] = line
                    packed.add(name)
            done.append(path)
            if path is files[-1] or sum(map(len, part.values())) >= file_bytes:
                number += 1
                self._replace(done, self.folder / f"packed-{number:08d}.jsonl", part.values())
                for name in gone & self.texts.keys():
                    self.num_bytes -= self.texts.pop(name).num_bytes
                part, done, gone = {}, [], set()

    def _replace(self, files: list[Path], new: Path, lines: Iterable[bytes]) -> None:
        data = b"".join(lines)
        if data:
            write_whole(new, data, is_only_writer=True)
            self._read[new.name] = len(data)
        for path in files:
            path.unlink(missing_ok=True)
            self._read.pop(path.name, None)

    def _read_file(self, path: Path) -> list[KeptText]:
        start = self._read.get(path.name, 0)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, new = data[: data.rfind(b"\n") + 1], []  # the rest is being written
        for line in whole.splitlines():
            text = read_line(line)
            if text is not None and text.id not in self.texts:
                kept = KeptText(
                    text.record(), min(text.time, time.time()), text.is_heldout, text.draw,
                    len(line) + 1,
                )  # fmt: skip
                self.texts[text.id] = kept
                self.num_bytes += kept.num_bytes
                new.append(kept)
        self._read[path.name] = start + len(whole)
        return new


def even_sample(texts: dict[str, KeptText], max_bytes: int) -> set[str]:
    """Ids of texts of about `max_bytes` in all: kinds get equal room, and in a kind spans of time.

    What a small kind does not need is for the others. Each text's draw decides whether it stays, so
    thinning out twice keeps what thinning out once would.
    """
    by_kind: dict[str, dict[str, KeptText]] = {}
    for name, text in texts.items():
        by_kind.setdefault(text.record.category, {})[name] = text
    rooms = shared_room({kind: _bytes(part) for kind, part in by_kind.items()}, max_bytes)
    parts = (_spread(part, rooms[kind], _HALVINGS) for kind, part in by_kind.items())
    return set[str]().union(*parts)


def _spread(texts: dict[str, KeptText], room: int, halvings: int) -> set[str]:
    """Each half of the time gets half of the room, and so does each half of these.

    A text with a wrong time, of a clock that was not set, takes one halving from the others.
    """
    times = [text.time for text in texts.values()]
    middle = (min(times) + max(times)) / 2
    is_few = room * len(texts) < _FEWEST * _bytes(texts)
    early = {name: text for name, text in texts.items() if text.time <= middle}
    if halvings and not is_few and len(early) < len(texts):
        late = {name: text for name, text in texts.items() if text.time > middle}
        rooms = shared_room({False: _bytes(early), True: _bytes(late)}, room)
        return _spread(early, rooms[False], halvings - 1) | _spread(late, rooms[True], halvings - 1)
    kept = set[str]()
    for name in sorted(texts, key=lambda name: texts[name].draw):
        room -= texts[name].num_bytes
        if room >= 0:
            kept.add(name)
    return kept


def shared_room(needs: dict[Name, int], room: int) -> dict[Name, int]:
    """Equal parts of `room`, none more than is needed; the rest is shared again."""
    given: dict[Name, int] = {}
    for number, name in enumerate(sorted(needs, key=lambda name: needs[name])):
        given[name] = min(needs[name], room // (len(needs) - number))
        room -= given[name]
    return given


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Whole lines of a file, which may be gone, by the ids that they begin with."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            found = _ID.match(line)
            if found is not None and line.endswith(b"\n"):
                yield found[1].decode(), line


def _bytes(texts: dict[str, KeptText]) -> int:
    return sum(text.num_bytes for text in texts.values())
