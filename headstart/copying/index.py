"""Where the end of a growing text has occurred before: a suffix automaton, one token at a time.

A state stands for all pieces of the text that end at the same places; its link leads to the longest
suffix of theirs that ends at more places. So the link of the newest state is the longest end of the
text that occurs earlier, and a token costs the same however long the text is, on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MIN_MATCH = 3  # tokens that must agree before anything is copied
# States whose latest place is kept up to date with a token. More are nested only in texts that
# repeat a piece over and over; there a shorter end of the text may be found at an older place.
_NESTED = 64


class Match(NamedTuple):
    """The longest end of a text that occurs earlier: its tokens, and where it went on there."""

    length: int
    place: int  # of the token that followed, at the latest such place


class TextIndex:
    """A text, and all pieces of it."""

    __slots__ = (
        "_after", "_ends", "_first", "_lengths", "_links", "_more", "_newest", "_place", "_root",
        "tokens",
    )  # fmt: skip

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens = array("i")  # arrays take half the memory of lists
        # By state: tokens of its longest piece, its link, where it ended last.
        self._lengths, self._links, self._ends = array("i", [0]), array("i", [-1]), array("i", [-1])
        # What follows a state: one token and the state behind it, of few states more of them.
        self._first, self._after = array("i", [-1]), array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}
        self._root: dict[int, int] = {}  # what follows the state of the empty piece: every token
        self._newest = 0
        self._place = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_states(self) -> int:
        return len(self._lengths)

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens at the end."""
        lengths, links, ends = self._lengths, self._links, self._ends
        first, after, more, root = self._first, self._after, self._more, self._root
        text, state, end = self.tokens, self._newest, len(self.tokens)
        for token in tokens:
            new = len(lengths)
            text.append(token)
            lengths.append(end + 1)
            links.append(0)
            ends.append(end)
            first.append(-1)
            after.append(-1)
            first[state], after[state] = token, new  # nothing followed the newest until now
            link = links[state]
            while link > 0:
                if first[link] == token:
                    found = after[link]
                    break
                own = more.setdefault(link, {})
                if (found := own.setdefault(token, new)) != new:
                    break
                link = links[link]
            else:
                found = root.setdefault(token, new)
            if found != new:
                if lengths[found] != lengths[link] + 1:
                    found = self._split(link, token, found)
                links[new] = found
                self._place = ends[found] + 1
                ends[found] = end  # and those of shorter ends of the text, too
                found, nested = links[found], 1
                while found > 0 and nested < _NESTED:
                    ends[found] = end
                    found, nested = links[found], nested + 1
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

    def _split(self, state: int, token: int, longer: int) -> int:
        """A state for the pieces that `token` makes of those of `state`, which end at more places.

        Until now they were in the state `longer`.
        """
        links, first, after, more = self._links, self._first, self._after, self._more
        split = len(links)
        self._lengths.append(self._lengths[state] + 1)
        links.append(links[longer])
        self._ends.append(self._ends[longer])
        first.append(first[longer])
        after.append(after[longer])
        if longer in more:
            more[split] = more[longer].copy()
        while state > 0:
            if first[state] == token:
                if after[state] != longer:
                    break
                after[state] = split
            elif more[state][token] == longer:
                more[state][token] = split
            else:
                break
            state = links[state]
        else:
            if self._root[token] == longer:
                self._root[token] = split
        links[longer] = split
        return split


def continued(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from a place on; those behind the end repeat what was copied."""
    found = list(tokens[place : place + count])
    period = len(found)
    while period and len(found) < count:
        found.append(found[len(found) - period])
    return found
