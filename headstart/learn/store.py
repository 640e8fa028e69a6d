"""Served texts on disk: files that are only appended to, and one thinned file of older ones.

The server writes `served-N.jsonl`; the learner reads all of them, and when there is too much it
writes what stays into `packed-N.jsonl` and removes the files that went into it. A kill at any
moment loses at most the texts that were not written yet; a text that is in two files counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headstart.files import write_whole
from headstart.learn.appending import Appender, number_of
from headstart.learn.texts import read_line

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.learn.texts import Text

Name = TypeVar("Name")
_FILE_BYTES = 4 << 20
_FULL, _THINNED = 1.0, 0.8  # of the space: when texts are thinned out, and to how much
_PERIODS = 16  # spans of time that a kind's texts are spread over


class TextWriter(Appender):
    """Appends texts; belongs to one thread of the server. OSError where the disk does not take."""

    def __init__(self, folder: Path):
        super().__init__(folder, "served", ".jsonl", _FILE_BYTES)

    def add(self, texts: Iterable[Text]) -> int:
        """Write texts, and let the system have them; returns bytes."""
        return self.append([b"".join(text.line() for text in texts)])


@dataclass(eq=False)
class KeptText:
    """A text in memory."""

    record: Record
    time: float
    is_heldout: bool
    draw: float
    num_bytes: int  # on disk


@dataclass
class Store:
    """All texts of a folder, as a reader has them; `refresh` adds what was written meanwhile."""

    folder: Path
    max_bytes: int
    texts: dict[str, KeptText] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)  # file name -> bytes that were read

    def refresh(self) -> list[KeptText]:
        """Read new lines; returns the texts that are new."""
        files = sorted(self.folder.glob("*.jsonl"))
        return [text for path in files for text in self._read_file(path)]

    @property
    def num_bytes(self) -> int:
        return sum(text.num_bytes for text in self.texts.values())

    def split(self, *, is_heldout: bool) -> list[KeptText]:
        """One side, oldest first."""
        found = [text for text in self.texts.values() if text.is_heldout == is_heldout]
        return sorted(found, key=lambda text: text.time)

    def thin(self) -> tuple[int, list[KeptText]]:
        """Where there are too many, keep an even sample.

        Returns how many were dropped, and texts that were written since `refresh` and are new.

        The newest served file is the writer's: it stays as it is.
        """
        if self.num_bytes <= _FULL * self.max_bytes:
            return 0, []
        kept = even_sample(self.texts, int(_THINNED * self.max_bytes))
        files = sorted(self.folder.glob("*.jsonl"))
        served = [path for path in files if path.name.startswith("served-")]
        done = [path for path in files if path not in served[-1:]]
        numbers = [number_of(path) for path in files if path not in served]
        lines, written = list[bytes](), set[str]()
        for path in done:
            for line in path.read_bytes().splitlines(keepends=True):
                text = read_line(line)
                if text is None or text.id in written:
                    continue
                if text.id in kept or text.id not in self.texts:  # written since `refresh`
                    lines.append(line)
                    written.add(text.id)
        number = 1 + max(numbers, default=0)
        packed = self.folder / f"packed-{number:08d}.jsonl"
        data = b"".join(lines)
        write_whole(packed, data, is_only_writer=True)
        for path in done:
            path.unlink()
        known, self.texts, self._read = self.texts, {}, {}
        late = [text for text in self.refresh() if text.record.id not in known]
        return len(known.keys() - self.texts.keys()), late

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
                kept = KeptText(text.record(), text.time, text.is_heldout, text.draw, len(line) + 1)
                self.texts[text.id] = kept
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
    kept: set[str] = set()
    rooms = shared_room({kind: _bytes(part) for kind, part in by_kind.items()}, max_bytes)
    for kind, part in by_kind.items():
        periods = _periods(part)
        room = shared_room({n: _bytes(own) for n, own in periods.items()}, rooms[kind])
        for number, own in periods.items():
            left = room[number]
            for name in sorted(own, key=lambda name: texts[name].draw):
                left -= own[name].num_bytes
                if left >= 0:
                    kept.add(name)
    return kept


def shared_room(needs: dict[Name, int], room: int) -> dict[Name, int]:
    """Equal parts of `room`, none more than is needed; the rest is shared again."""
    given: dict[Name, int] = {}
    for number, name in enumerate(sorted(needs, key=lambda name: needs[name])):
        given[name] = min(needs[name], room // (len(needs) - number))
        room -= given[name]
    return given


def _periods(texts: dict[str, KeptText]) -> dict[int, dict[str, KeptText]]:
    times = [text.time for text in texts.values()]
    first, span = min(times), max(max(times) - min(times), 1e-9)
    result: dict[int, dict[str, KeptText]] = {}
    for name, text in texts.items():
        number = min(_PERIODS - 1, int((text.time - first) / span * _PERIODS))
        result.setdefault(number, {})[name] = text
    return result


def _bytes(texts: dict[str, KeptText]) -> int:
    return sum(text.num_bytes for text in texts.values())
