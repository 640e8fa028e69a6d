"""Reads tool calls out of an answer that arrives in pieces.

What comes out depends on the text alone, not on how it was cut. A call is given out when it is
whole and well formed; what only looks like a call stays content. Where a grammar forces calls they
cannot go wrong, and their arguments are given out as they come; where it allows nothing else, a
call's name is given out as soon as no other tool's call begins in this way.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headstart.server.tools.arguments import Schemas
from headstart.server.tools.formats import Call, ToolFormat, called_name, read_bare


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class CallStarted:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    index: int
    text: str


ToolEvent = ContentDelta | CallStarted | ArgumentsDelta


class ToolParser:
    """One answer. Without a format everything is content."""

    def __init__(
        self,
        format: ToolFormat | None,
        schemas: Schemas | None = None,
        *,
        max_calls: int | None = None,
        is_forced: bool = False,
        only_calls: bool = False,
        openings: Mapping[str, str] | None = None,
    ):
        """`is_forced`: a grammar holds calls to their format; `only_calls`: and allows no text.

        `openings`: how it spells the calls of tools up to their arguments, by name.
        """
        self._format, self._schemas = format, schemas or {}
        self._max_calls, self._is_forced = max_calls, is_forced
        self._only_calls, self._openings = only_calls, openings or {}
        self.num_calls = 0
        self._text = ""  # not decided yet; inside of a call it begins with the space before it
        self._body: int | None = None  # where in `_text` the open call's body begins
        self._searched = 0  # no end marker that could be the call's begins before this
        self._is_after_call = False
        self._is_started = False  # whether the open call's name was given out
        self._arguments: _Arguments | None = None  # of the open call, where they are streamed

    def feed(self, text: str) -> list[ToolEvent]:
        """What this text makes certain."""
        self._text += text
        events: list[ToolEvent] = []
        if self._format is None:
            self._give(events, len(self._text))
        elif not self._format.begin:
            self._read_start(events, self._format)
        else:
            while self._read_call(events) if self._body is not None else self._find_call(events):
                pass
        return events

    def finish(self) -> list[ToolEvent]:
        """No more text: a call that is still open is none, and content unless all is calls."""
        events: list[ToolEvent] = []
        is_bare = self._format is not None and not self._format.begin
        calls = read_bare(self._text) if is_bare and not self._is_after_call else None
        if calls is not None:
            for call in calls:
                self._call(events, call)
            self._text = ""
        elif self._arguments is None and not self._only_calls:
            self._give(events, len(self._text))
        return events

    @property
    def is_in_call(self) -> bool:
        """Whether a call's beginning was given out, and its arguments not to their end."""
        return self._is_started and not (self._arguments and self._arguments.is_done)

    def _find_call(self, events: list[ToolEvent]) -> bool:
        """Outside of calls: give out content up to the next marker; True if one was found."""
        format = self._format
        assert format is not None
        if self._is_after_call:
            self._text = self._text.lstrip()
        marks = [text for text in (format.begin, *format.wrapper) if text]
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        stop = min(found)[0] if found else len(self._text) - num_held(self._text, marks)
        self._give(events, len(self._text[:stop].rstrip()))
        if not found:
            return False
        at, mark = self._text.find(min(found)[1]), min(found)[1]
        if mark == format.begin:
            self._body = self._searched = at + len(mark)
        else:
            self._text, self._is_after_call = self._text[at + len(mark) :], True
        return True

    def _read_call(self, events: list[ToolEvent]) -> bool:
        """Inside of a call: True if it ended, well or not."""
        format, body = self._format, self._body
        assert format is not None and body is not None
        if self._is_forced and format.head is not None:
            self._stream(events, format)
        at = self._text.find(format.end, self._searched)
        if at < 0:
            self._searched = max(body, len(self._text) - len(format.end) + 1)
            return False
        stop = at + len(format.end)
        reading = format.read(self._text[body:at], self._schemas)
        if reading == "open":
            self._searched = stop
            return True
        self._body = None
        if isinstance(reading, Call) or self._arguments is not None:
            if isinstance(reading, Call) and self._arguments is None:
                self._call(events, reading)
            self._text, self._is_after_call = self._text[stop:], True
            self._arguments, self._is_started = None, False
        else:
            self._is_started = False
            self._give(events, stop)
        return True

    def _stream(self, events: list[ToolEvent], format: ToolFormat) -> None:
        assert self._body is not None and format.head is not None
        if self._arguments is None and (self._is_started or not self._is_full):
            head = format.head.match(self._text, self._body)
            name = called_name(head) if head is not None else self._only_name(format)
            if name is not None and not self._is_started:
                self._start(events, name)
                self._is_started = True
            if head is None:
                return
            self._arguments = _Arguments(head.end())
        if self._arguments is not None and (part := self._arguments.more(self._text)):
            events.append(ArgumentsDelta(self.num_calls - 1, part))

    def _only_name(self, format: ToolFormat) -> str | None:
        """The name of the open call, where only one tool's call begins as it does."""
        assert self._body is not None
        begun = self._text[self._body - len(format.begin) :]
        left = [name for name, opening in self._openings.items() if opening.startswith(begun)]
        return left[0] if len(left) == 1 else None

    def _read_start(self, events: list[ToolEvent], format: ToolFormat) -> None:
        """Without markers the beginning decides: all is held back, or all is content."""
        text = self._text.lstrip()
        starts = ("{", *format.markers)
        may_be = any(text.startswith(start) or start.startswith(text) for start in starts)
        if self._is_after_call or not may_be:
            self._is_after_call = True
            self._give(events, len(self._text), keep_state=True)

    def _give(self, events: list[ToolEvent], size: int, *, keep_state: bool = False) -> None:
        """The first `size` characters are content."""
        if size:
            events.append(ContentDelta(self._text[:size]))
            self._text = self._text[size:]
            self._is_after_call = self._is_after_call and keep_state

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def _call(self, events: list[ToolEvent], call: Call) -> None:
        """A request for one call at most gets the first one; the others are left out."""
        if not self._is_full:
            self._start(events, call.name)
            events.append(ArgumentsDelta(self.num_calls - 1, call.arguments))

    def _start(self, events: list[ToolEvent], name: str) -> None:
        events.append(CallStarted(self.num_calls, f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1


class _Arguments:
    """Follows a JSON object in growing text up to its closing brace."""

    def __init__(self, start: int):
        self._at, self._depth = start, 0
        self._in_string = self._is_escaped = False
        self.is_done = False  # the last brace was read

    def more(self, text: str) -> str:
        start = self._at
        while self._at < len(text) and not self.is_done:
            self._step(text[self._at])
            self._at += 1
        return text[start : self._at]

    def _step(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped, self._in_string = char == "\\", char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0


def num_held(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
