"""Special tokens out of a text in which the marks of calls and of thinking had to stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headstart.server.markers import num_held


class WithoutSpecial:
    """One sample's text; only what came from a special token goes, not the same words as text."""

    def __init__(self, texts: Mapping[int, str]):
        self._texts = texts  # of the tokens to take out, by id
        self._due: Counter[str] = Counter()  # seen as tokens, and not yet in the text
        self._waiting = ""

    def feed(self, token_ids: Sequence[int], text: str) -> str:
        """The text that stays; text comes with its tokens or after them, never before."""
        self._due.update(self._texts[token] for token in token_ids if token in self._texts)
        if not self._due:
            return text
        self._waiting += text
        kept = ""
        while found := [
            (self._waiting.find(due), due) for due in self._due if due in self._waiting
        ]:
            at, due = min(found)
            kept, self._waiting = kept + self._waiting[:at], self._waiting[at + len(due) :]
            self._due -= Counter([due])
        stop = len(self._waiting) - num_held(self._waiting, self._due)
        kept, self._waiting = kept + self._waiting[:stop], self._waiting[stop:]
        return kept

    def finish(self) -> str:
        rest, self._waiting = self._waiting, ""
        return rest
