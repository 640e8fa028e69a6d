"""Answers as they come, one JSON line each, behind a header line: journal.jsonl.

The journal is what an interrupted run goes on from, and what a dataset is made from. It is only
ever appended to. A last line without its end was being written when the run was killed: it is
ignored, and removed before anything is appended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headstart.documents import misfit, parse_json
from headstart.errors import DataError, some
from headstart.files import plain_lines

JOURNAL_NAME = "journal.jsonl"
JOURNAL_VERSION = 1
_SYNC_SECONDS = 2.0  # a power cut costs at most the answers of this long


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How answers were asked for: the journal's header. All answers of a journal share it."""

    origin: str  # engine, server, import or collected
    trunk_digest: str
    tokenizer_sha: str
    template_sha: str
    vocab_size: int
    hidden_size: int
    sampling: dict[str, Any]  # temperature, top_k, top_p, max_tokens; empty for an import
    seed: int | None
    chat_template_kwargs: dict[str, Any]
    # dtype, weights and device of the embedded engine; empty where it is not (yet) known
    engine: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One generation: what was asked, what came, and how."""

    prompt_id: str
    category: str
    turn: int  # from 0
    sample: int  # from 0
    prompt_sha: str  # of the whole conversation's prompts
    user: str  # the message that is answered
    text: str
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    finish_reason: str
    seed: int | None  # of the noise, where our engine made it
    exact_ids: bool  # False: the ids are a new tokenisation of the text
    max_tokens: int | None = None  # how long it could have become, as the engine resolved it
    server_seed: int | None = None  # what a server was sent; its noise is its own

    @property
    def key(self) -> tuple[str, int, int]:
        return self.prompt_id, self.turn, self.sample

    @property
    def id(self) -> str:
        return f"{self.prompt_id}/t{self.turn}/s{self.sample}"


def read_journal(path: Path) -> tuple[Asked, list[Answer]]:
    """Header and answers; DataError names the line that is broken."""
    asked, answers, _ = _read(path)
    if asked is None:
        raise DataError(f"{path} is empty: no answer was kept. Run `headstart distill` again.")
    return asked, answers


def earlier_answers(path: Path, asked: Asked) -> list[Answer]:
    """What is in a journal already; DataError if it was begun in another way."""
    known, answers, _ = _read(path)
    if known is not None:
        _check_same(path, known, asked)
    return answers


class Journal:
    """A journal open for appending."""

    def __init__(self, path: Path, asked: Asked):
        self.path = path
        self._handle = _locked(path)
        try:
            known, answers, self._end = _read(path)
            self.num_answers = len(answers)
            if known is not None:
                _check_same(path, known, asked)
            os.ftruncate(self._handle, self._end)
            self._synced = time.monotonic()
            if known is None:
                self._write({"headstart_journal": JOURNAL_VERSION, **asdict(asked)})
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, answer: Answer) -> None:
        """Keep an answer: given to the system at once, to the disk within seconds."""
        ids = {"prompt_ids": list(answer.prompt_ids), "answer_ids": list(answer.answer_ids)}
        self._write({**vars(answer), **ids})
        self.num_answers += 1
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._handle)
            self._synced = time.monotonic()

    def _write(self, entry: dict[str, Any]) -> None:
        # Half a surrogate pair, which a server may send, is written as the escape that JSON has.
        text = json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"
        line = text.encode("utf-8", errors="backslashreplace")
        try:
            done = 0
            while done < len(line):
                done += os.write(self._handle, line[done:])
        except BaseException:  # a full disk, Ctrl-C: half a line must not stay before the next one
            os.ftruncate(self._handle, self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        os.fsync(self._handle)
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DataError(
            f"{path} is a link, whose target would be written. Remove it, or choose another --out."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DataError(f"another run is writing {path} right now. Wait for it to end.") from None
    return handle


def _read(path: Path) -> tuple[Asked | None, list[Answer], int]:
    """Header, answers, and where the last whole line ends."""
    asked: Asked | None = None
    answers: list[Answer] = []
    end = 0
    try:
        for number, line in enumerate(plain_lines(path), 1):
            if not line.endswith(b"\n"):
                break
            entry = _parsed(path, number, line)
            if number == 1:
                asked = _asked(path, entry)
            else:
                answers.append(_answer(path, number, entry))
            end += len(line)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the folder.") from error
    return asked, answers, end


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise _broken(path, number, f"is not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise _broken(path, number, "is not a JSON object")
    return entry


def _asked(path: Path, entry: dict[str, Any]) -> Asked:
    version = entry.pop("headstart_journal", None)
    if version != JOURNAL_VERSION:
        raise DataError(
            f"{path} has headstart_journal {version!r}; this version reads {JOURNAL_VERSION}. "
            "Give the folder of a dataset, or update Headstart."
        )
    _check_fields(path, 1, entry, Asked)
    return Asked(**entry)


def _answer(path: Path, number: int, entry: dict[str, Any]) -> Answer:
    _check_fields(path, number, entry, Answer)
    try:
        # Four bytes a token: as Python integers a large journal would fill the memory.
        entry["prompt_ids"] = array("i", entry["prompt_ids"])
        entry["answer_ids"] = array("i", entry["answer_ids"])
    except (TypeError, OverflowError) as error:
        raise _broken(path, number, f"has something else than token ids ({error})") from error
    return Answer(**entry)


def _check_fields(path: Path, number: int, entry: dict[str, Any], kind: type) -> None:
    expected = {each.name for each in fields(kind)}
    if set(entry) != expected:
        wrong = some(sorted(set(entry) ^ expected))
        raise _broken(path, number, f"lacks a field or has a strange one ({wrong})")
    if misfits := misfit(kind, entry):
        raise _broken(path, number, f"has a wrong value ({misfits})")


def _broken(path: Path, number: int, what: str) -> DataError:
    return DataError(
        f"{path} line {number} {what}; expected what `headstart distill` wrote. Remove that line, "
        "or take the file from a copy."
    )


def _check_same(path: Path, known: Asked, asked: Asked) -> None:
    """Answers of two models, or asked for in two ways, do not belong into one dataset."""
    names = [each.name for each in fields(Asked) if each.name != "engine"]
    pairs = [(name, getattr(known, name), getattr(asked, name)) for name in names]
    # A run that has nothing left to ask starts no engine, and goes with any.
    pairs += [(name, known.engine.get(name), value) for name, value in asked.engine.items()]
    for name, was, now in pairs:
        if was != now:
            raise DataError(
                f"{path} was begun with {name} {_short(was)}, this run has {_short(now)}. "
                "Run with the same model and settings to go on, or choose another --out."
            )


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:80]}..."
