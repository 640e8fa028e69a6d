"""The journal of a cache that is being written: what was stored, and how much of it can be trusted.

One JSON line per record, written after the record's bytes. A kill may leave bytes without a line,
or a torn line; a power cut also lines without their bytes.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from headstart.documents import parse_json
from headstart.errors import DataError
from headstart.files import open_no_link, plain_lines, write_whole
from headstart.train.states.header import JOURNAL_NAME

_READ_BYTES = 2**24


@dataclass(frozen=True)
class Entry:
    """Where a record lies, and the checksum of its shard from the start to the record's end."""

    id: str
    shard: int
    offset: int
    num_tokens: int
    end: int
    crc32: int


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def open_plain(path: Path, mode: Literal["rb", "ab"]) -> BinaryIO:
    """Open a file of a cache; DataError for a link, whose target would be read or written."""
    try:
        return open_no_link(path, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DataError(
            f"{path} is a link; expected a file of the cache itself. Remove it, or give another "
            "--cache folder."
        ) from None


def journal_line(entry: Entry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def recover(folder: Path) -> list[Entry]:
    """Entries of an earlier writer that its files bear out; all else is cut off from the files.

    Only the last shard's bytes are read: a writer leaves a shard only when it is safe on disk.
    """
    journaled = list(_read_journal(folder / JOURNAL_NAME))
    last = max((entry.shard for entry in journaled), default=0)
    kept = [entry for entry in journaled if entry.shard < last]
    tail = [entry for entry in journaled if entry.shard == last]
    kept += _borne_out(folder / shard_name(last), tail)
    replace_text(folder / JOURNAL_NAME, map(journal_line, kept))
    end = kept[-1] if kept else Entry("", 0, 0, 0, 0, 0)
    for path in folder.glob("shard-*.bin"):
        number = path.stem.removeprefix("shard-")
        if number.isdecimal() and int(number) > end.shard:
            path.unlink()
    with open_plain(folder / shard_name(end.shard), "ab") as file:
        file.truncate(end.end)
    return kept


def _read_journal(path: Path) -> Iterator[Entry]:
    if not path.exists():
        return
    for line in plain_lines(path):
        try:
            entry = Entry(**parse_json(line))
        except (ValueError, TypeError):
            return  # torn by a kill: nothing behind it counts
        places = (entry.shard, entry.offset, entry.num_tokens, entry.end, entry.crc32)
        if not all(type(number) is int and number >= 0 for number in places):
            return
        yield entry


def _borne_out(path: Path, entries: list[Entry]) -> Iterator[Entry]:
    """Entries of one shard, up to the first whose bytes are not those that were checksummed."""
    if not path.exists():
        return
    with open_plain(path, "rb") as file:
        crc32, at = 0, 0
        for entry in entries:
            while at < entry.end and (data := file.read(min(_READ_BYTES, entry.end - at))):
                crc32, at = zlib.crc32(data, crc32), at + len(data)
            if at < entry.end or crc32 != entry.crc32:
                return
            yield entry


def replace_text(path: Path, lines: Iterable[str]) -> None:
    """Write a document whole or not at all; the folder is locked."""
    write_whole(path, "".join(lines).encode(), is_only_writer=True)
