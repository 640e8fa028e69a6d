"""The tokens that a text adds to its draft vocabulary: those it holds and the list has not.

A list is made once, for many texts, and misses names and other languages, which a text repeats. So
a request drafts from its list and from its own tokens: of the tokens outside the list the `limit`
that its text, prompt and answer, had last. That is a function of text, list and limit alone, which
engine and simulator compute alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headstart.errors import ConfigError

MAX_OWN = 1024  # tokens of one text: what kernels have room for


@dataclass(frozen=True)
class OwnRule:
    """Which tokens of a text are its own."""

    listed: bytes  # for every token of the trunk 1 where the list has it
    limit: int

    @classmethod
    def of(cls, ids: Iterable[int], vocab_size: int, limit: int) -> OwnRule:
        check_limit(limit)
        listed = bytearray(vocab_size)
        for token in ids:
            listed[token] = 1
        return cls(bytes(listed), limit)

    def start(self) -> OwnTokens:
        """The own tokens of a text that has not been read."""
        return OwnTokens(self)

    def num_inside(self, text: Sequence[int], mask: Sequence[bool]) -> int:
        """Masked tokens that can be drafted when the text has come to the one before them."""
        own, inside = self.start(), 0
        for position, (token, is_counted) in enumerate(zip(text, mask, strict=True)):
            inside += bool(is_counted) and (bool(self.listed[token]) or token in own)
            own.add(position, token)
        return inside

    def spans(self, text: Sequence[int]) -> Iterator[OwnSpan]:
        """When each token of a whole text is its own."""
        own = self.start()
        since: dict[int, int] = {}
        for position, token in enumerate(text):
            dropped = own.add(position, token)
            if dropped is not None:
                yield OwnSpan(dropped, since.pop(dropped), position)
            if not self.listed[token]:
                since.setdefault(token, position)
        for token, begin in since.items():
            yield OwnSpan(token, begin, len(text))


@dataclass(frozen=True)
class OwnSpan:
    """A token that is a text's own while the newest token is at [begin, end)."""

    token: int
    begin: int
    end: int


class OwnTokens:
    """The own tokens of one text that grows, each in a slot that it keeps until it is dropped."""

    def __init__(self, rule: OwnRule):
        self._rule = rule
        self.ids: list[int] = []  # by slot
        self.last: list[int] = []  # by slot: where the text had the token last
        self.written: list[int] = []  # slots in the order in which they got a token
        self._slots: dict[int, int] = {}  # by token, that of the text's end last
        self.num_read = 0

    def __contains__(self, token: int) -> bool:
        return token in self._slots

    def read(self, text: Sequence[int]) -> None:
        """Take in what the text has got since the last time."""
        listed = self._rule.listed
        for position in range(self.num_read, len(text)):
            if not listed[text[position]]:
                self.add(position, text[position])
        self.num_read = len(text)

    def add(self, position: int, token: int) -> int | None:
        """The token at the text's end; returns the one that is dropped for it, if any."""
        if self._rule.listed[token]:
            return None
        slot = self._slots.pop(token, None)
        dropped = None
        if slot is None:
            slot = len(self.ids)
            if slot < self._rule.limit:
                self.ids.append(token)
                self.last.append(position)
            else:
                dropped = next(iter(self._slots))  # the one that the text had longest ago
                slot = self._slots.pop(dropped)
                self.ids[slot] = token
            self.written.append(slot)
        self._slots[token] = slot
        self.last[slot] = position
        return dropped


def check_limit(limit: int) -> None:
    if type(limit) is not int or not 0 < limit <= MAX_OWN:
        raise ConfigError(
            f"draft_vocab_own is {limit!r}; give a whole number from 1 to {MAX_OWN}, or 0 for "
            "none.",
            field="draft_vocab_own",
        )


def check_beside(own: int, flag: str) -> None:
    """ConfigError where own tokens are asked for without a list, which `flag` would give."""
    if own:
        raise ConfigError(
            "draft_vocab_own is given without a draft vocabulary, beside which it counts. Give "
            f"{flag}, too, or leave it out.",
            field="draft_vocab_own",
        )
