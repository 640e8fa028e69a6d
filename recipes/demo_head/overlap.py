"""Whether a prompt is one of a benchmark's questions, or nearly: by runs of words in common."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_LONG, _SHORT = 8, 4  # words of a run
_SHARE = 0.4  # of the short runs of a question that a prompt may not have
_MOST_WORDS = 200  # a longer prompt holds a whole text, of which short runs say nothing


class Questions:
    """A benchmark's questions, to be kept out of what is learned from.

    A prompt is too near if it has eight words in a row with a question, four of ten of its runs of
    four words, or if it is the same short text.
    """

    def __init__(self, questions: Iterable[str]) -> None:
        self._long: set[tuple[str, ...]] = set()
        self._places: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self._counts: list[int] = []
        self._whole: set[tuple[str, ...]] = set()
        for place, question in enumerate(questions):
            words = words_of(question)
            self._whole.add(tuple(words))
            self._long.update(runs_of(words, _LONG))
            short = set(runs_of(words, _SHORT))
            self._counts.append(len(short))
            for run in short:
                self._places[run].add(place)

    def is_near(self, prompt: str) -> bool:
        words = words_of(prompt)
        if tuple(words) in self._whole:
            return True
        if any(run in self._long for run in runs_of(words, _LONG)):
            return True
        if len(words) > _MOST_WORDS:
            return False
        common: dict[int, int] = defaultdict(int)
        for run in set(runs_of(words, _SHORT)):
            for place in self._places.get(run, ()):
                common[place] += 1
        return any(count >= _SHARE * self._counts[place] for place, count in common.items())


def words_of(text: str) -> list[str]:
    """Letters and digits, in lower case."""
    return re.findall(r"\w+", text.casefold())


def runs_of(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    """All that stand next to each other, `length` at a time."""
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
