r"""Regular expressions of downloaded configs, matched in bounded time.

Python's `re` tries one way after another, and `(x+)+!` has more ways than there is time for.
Here all positions that a part of the pattern can reach are followed at once, as bits of a number.
Understood: characters, `.`, classes, `\d` and its kin, groups, alternatives, repetition, `^`, `$`
and look-ahead; not a repetition inside of a repeated group, nor references back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from headstart.errors import BadConfig

_MAX_LENGTH = 1000  # of a pattern
_MAX_TIMES = 100  # in `{m,n}`: these are walked one by one
_MAX_DEPTH = 20  # of groups in groups
_CLASSES = "dDwWsS"
_CLASS = re.compile(r"\^?\]?(?:[^]\\[&~|]|\\.)*\]")  # doubled & ~ | may get a meaning in `re`
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BRACES = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")


class _Refused(Exception):
    """What in a pattern is not understood."""


@dataclass(frozen=True)
class _Part:
    """A piece of a pattern: (positions it starts at, the name) -> positions it can end at."""

    ends: Callable[[int, str], int]
    repeats: bool = False  # whether it may run more than once over a name
    looks_ahead: bool = False


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` fits `name` from its first character on, as `re.match` has it."""
    prefix, part = _compiled(pattern)
    return name.startswith(prefix) and part.ends(1, name) != 0


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> tuple[str, _Part]:
    """What names must begin with, and the whole pattern."""
    try:
        if len(pattern) > _MAX_LENGTH:
            raise _Refused(f"more than {_MAX_LENGTH} characters")
        reader = _Reader(pattern)
        return reader.prefix(), reader.whole()
    except _Refused as refused:
        shown = pattern if len(pattern) < 80 else pattern[:77] + "..."
        raise BadConfig(
            f"the quantisation config has the pattern {shown!r} with {refused}; expected "
            "characters, classes, groups, alternatives and repetitions that are not nested. Write "
            "it in a simpler way, or list the modules by name."
        ) from None


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.depth = pattern, 0, 0

    def prefix(self) -> str:
        """Plain characters at the start, when nothing behind them can take them back."""
        plain = re.match(r"\^?((?:[A-Za-z0-9_-]|\\\.)*)(?![*+?{])", self.text)
        return "" if plain is None or "|" in self.text else plain[1].replace("\\.", ".")

    def whole(self) -> _Part:
        found = self.alternatives()
        if self.at < len(self.text):
            raise _Refused("a bracket that was not opened")
        return found

    def alternatives(self) -> _Part:
        options = [self.sequence()]
        while self._took("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else _any_of(options)

    def sequence(self) -> _Part:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated())
        return _in_turn(parts)

    def repeated(self) -> _Part:
        part = self.single()
        if (times := self._times()) is None:
            return part
        low, high = times
        if part.repeats and (high is None or high > 1):
            raise _Refused("a repetition inside of a repeated group")
        self._took("?")  # fewest first: the same names match
        if self._times() is not None:
            raise _Refused("a repetition of a repetition")
        return _repeat(part, low, high)

    def single(self) -> _Part:
        character = self.text[self.at]
        self.at += 1
        if character == "(":
            return self.group()
        if character == "[":
            return self.character_class()
        if character == "\\":
            return self.escaped()
        if character == ".":
            return _one(lambda c: c != "\n")
        if character == "^":
            return _Part(lambda starts, name: starts & 1)
        if character == "$":
            return _Part(lambda starts, name: starts & (1 << len(name)))
        if character in "*+?{":
            raise _Refused(f"a {character} that repeats nothing")
        return _one(character.__eq__)

    def group(self) -> _Part:
        kind = next((k for k in ("?:", "?=", "?!") if self.text.startswith(k, self.at)), "")
        self.at += len(kind)
        if self.text[self.at : self.at + 1] == "?":
            raise _Refused("a group of another kind than (), (?:), (?=) and (?!)")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _Refused(f"more than {_MAX_DEPTH} groups in each other")
        inner = self.alternatives()
        self.depth -= 1
        if not self._took(")"):
            raise _Refused("a bracket that is not closed")
        if kind in ("", "?:"):
            return inner
        if inner.looks_ahead:
            raise _Refused("a look-ahead inside of a look-ahead")
        return _ahead(inner, kind == "?=")

    def character_class(self) -> _Part:
        found = _CLASS.match(self.text, self.at)
        try:
            # One character against one class: there is nothing to try again.
            pattern = re.compile("[" + (found[0] if found else ""))
        except re.error:
            raise _Refused("a class of characters that cannot be read") from None
        self.at += len(pattern.pattern) - 1
        return _one(lambda c: pattern.match(c) is not None)

    def escaped(self) -> _Part:
        character = self.text[self.at : self.at + 1]
        self.at += 1
        if character and character in _CLASSES:
            pattern = re.compile(f"\\{character}")
            return _one(lambda c: pattern.match(c) is not None)
        if not character or (character.isalnum() and character.isascii()):
            raise _Refused(f"\\{character}")
        return _one(character.__eq__)

    def _times(self) -> tuple[int, int | None] | None:
        character = self.text[self.at : self.at + 1]
        if character in _COUNTS:
            self.at += 1
            return _COUNTS[character]
        braces = _BRACES.match(self.text, self.at)
        if braces is None or braces[0] == "{}":
            return None
        self.at = braces.end()
        low, high = int(braces[1] or 0), int(braces[3]) if braces[3] else None
        high = high if braces[2] else low
        if max(low, high or 0) > _MAX_TIMES or (high is not None and high < low):
            raise _Refused(f"{braces[0]}")
        return low, high

    def _took(self, character: str) -> bool:
        taken = self.text[self.at : self.at + 1] == character
        self.at += taken
        return taken


def _one(fits: Callable[[str], bool]) -> _Part:
    def ends(starts: int, name: str) -> int:
        return sum(2 << at for at in _bits(starts) if at < len(name) and fits(name[at]))

    return _Part(ends)


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _in_turn(parts: list[_Part]) -> _Part:
    def ends(starts: int, name: str) -> int:
        for part in parts:
            starts = part.ends(starts, name) if starts else 0
        return starts

    return _joined(ends, parts)


def _any_of(parts: list[_Part]) -> _Part:
    def ends(starts: int, name: str) -> int:
        found = 0
        for part in parts:
            found |= part.ends(starts, name)
        return found

    return _joined(ends, parts)


def _joined(ends: Callable[[int, str], int], parts: list[_Part]) -> _Part:
    return _Part(ends, any(p.repeats for p in parts), any(p.looks_ahead for p in parts))


def _repeat(part: _Part, low: int, high: int | None) -> _Part:
    def ends(starts: int, name: str) -> int:
        for _ in range(low):
            starts = part.ends(starts, name)
        found = new = starts
        times = low
        while new and times != high:
            new = part.ends(new, name) & ~found
            found |= new
            times += 1
        return found

    return _Part(ends, part.repeats or high is None or high > 1, part.looks_ahead)


def _ahead(part: _Part, is_wanted: bool) -> _Part:
    def ends(starts: int, name: str) -> int:
        places = [1 << at for at in _bits(starts)]
        return sum(place for place in places if bool(part.ends(place, name)) is is_wanted)

    return _Part(ends, part.repeats, looks_ahead=True)
