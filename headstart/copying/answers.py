"""A bounded store of answers that later ones may copy from, least recently used first to go.

Only whole runs of `ANSWER_MATCH` equal tokens are looked up, in one table for all answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ANSWER_MATCH = 8  # tokens that must agree before another answer is copied from
MOST_OF_ANSWER = 4096  # tokens that are kept of an answer, its last ones,
MEAN_OF_ANSWERS = 2048  # and of all answers for each that may be kept
_LONGEST = 256  # tokens that a match is followed back for

_Run = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True)
class FoundAnswer:
    """An answer with the same tokens, how many of them, and where it goes on."""

    tokens: Sequence[int]
    length: int
    place: int


class AnswerStore:
    """Answers by owner: a request copies only from answers to requests of its own cache salt."""

    def __init__(self, most: int):
        self._most, self._most_tokens = most, most * MEAN_OF_ANSWERS
        self._num_tokens = 0
        self._answers: OrderedDict[int, tuple[bytes, list[int]]] = OrderedDict()
        self._runs: dict[_Run, tuple[int, int]] = {}  # the latest answer with it, and its end there
        self._number = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, owner: bytes, tokens: Sequence[int]) -> None:
        """Keep an answer; the one that was not used for longest goes where there are too many."""
        if len(tokens) <= ANSWER_MATCH:
            return
        number, self._number = self._number, self._number + 1
        own = list(tokens[-min(MOST_OF_ANSWER, self._most_tokens) :])
        self._answers[number] = owner, own
        self._num_tokens += len(own)
        for end, run in _runs(owner, own):
            self._runs[run] = number, end
        while len(self._answers) > self._most or self._num_tokens > self._most_tokens:
            self._remove(next(iter(self._answers)))

    def _remove(self, number: int) -> None:
        owner, own = self._answers.pop(number)
        self._num_tokens -= len(own)
        for end, run in _runs(owner, own):
            if self._runs.get(run) == (number, end):
                del self._runs[run]

    def find(self, owner: bytes, text: Sequence[int]) -> FoundAnswer | None:
        """The latest answer that has the last tokens of a text, and goes on after them."""
        known = self._runs.get((owner, tuple(text[-ANSWER_MATCH:])))
        if known is None:
            return None
        number, place = known
        answer = self._answers[number][1]
        self._answers.move_to_end(number)
        length = ANSWER_MATCH
        most = min(_LONGEST, place, len(text))
        while length < most and answer[place - length - 1] == text[-length - 1]:
            length += 1
        return FoundAnswer(answer, length, place)


def _runs(owner: bytes, tokens: list[int]) -> Iterator[tuple[int, _Run]]:
    """Every run of tokens that something follows, with where it ends."""
    for end in range(ANSWER_MATCH, len(tokens)):
        yield end, (owner, tuple(tokens[end - ANSWER_MATCH : end]))
