"""Where the end of a growing text has occurred before: a suffix automaton, one token at a time.

A state stands for all pieces of the text that end at the same places; its link leads to the longest
suffix of theirs that ends at more places. So the link of the newest state is the longest end of the
text that occurs earlier, and a token costs the same however long the text is, on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_MATCH = 3  # tokens that must agree before anything is copied
# States whose latest place is kept up to date with a token. More are nested only in texts that
# repeat a piece over and over; there a shorter end of the text may be found at an older place.
_NESTED = 64


@dataclass(frozen=True)
class Match:
    """The longest end of a text that occurs earlier: its tokens, and where it went on there."""

    length: int
    place: int  # of the token that followed, at the latest such place


class TextIndex:
    """A text, and all pieces of it."""

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        # By state: tokens of its longest piece, its link, where it ended last, and what follows.
        self._lengths, self._links, self._ends = array("i", [0]), array("i", [-1]), array("i", [-1])
        self._next: list[dict[int, int]] = [{}]
        self._newest = 0
        self._place = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_states(self) -> int:
        return len(self._next)

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens at the end."""
        lengths, links, ends, after = self._lengths, self._links, self._ends, self._next
        state, end = self._newest, len(self.tokens)
        for token in tokens:
            new = len(after)
            self.tokens.append(token)
            lengths.append(end + 1)
            links.append(0)
            ends.append(end)
            after.append({})
            while state >= 0 and token not in (following := after[state]):
                following[token] = new
                state = links[state]
            if state >= 0:
                link, length = after[state][token], lengths[state] + 1
                if lengths[link] != length:
                    link = self._split(state, token, length)
                links[new] = link
                self._place = ends[link] + 1
                for _ in range(_NESTED):  # all these end here now
                    ends[link] = end
                    link = links[link]
                    if link <= 0:
                        break
            state = new
            end += 1
        self._newest = state

    def match(self, least: int = MIN_MATCH) -> Match | None:
        """The longest end of the text that occurs earlier, of at least so many tokens."""
        link = self._links[self._newest]
        if link <= 0 or self._lengths[link] < least:
            return None
        return Match(self._lengths[link], self._place)

    def following(self, place: int, count: int) -> list[int]:
        """`count` tokens from a place on; those behind the end repeat what was copied."""
        return continued(self.tokens, place, count)

    def _split(self, state: int, token: int, length: int) -> int:
        """A state for pieces of up to `length` tokens, which now end at one place more."""
        lengths, links, ends, after = self._lengths, self._links, self._ends, self._next
        longer, split = after[state][token], len(after)
        lengths.append(length)
        links.append(links[longer])
        ends.append(ends[longer])
        after.append(after[longer].copy())
        while state >= 0 and after[state].get(token) == longer:
            after[state][token] = split
            state = links[state]
        links[longer] = split
        return split


def continued(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from a place on; those behind the end repeat what was copied."""
    found = list(tokens[place : place + count])
    period = len(found)
    while period and len(found) < count:
        found.append(found[len(found) - period])
    return found
