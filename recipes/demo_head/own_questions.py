"""Which of the questions that a model wrote are worth asking: pure functions of the text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from overlap import Questions, words_of
from passages import language_of

from headstart.distill.minhash import Text, near_duplicates

_SHORTEST, _LONGEST = 12, 1200  # characters
_FEWEST_WORDS = 3
_LONGEST_WORD = 30
_LETTERS = 0.6  # of a question, with spaces
_REPEATED = 0.4  # of its runs of three words
_SIMILAR = 0.6
# A question that is answered in the same breath: the model has lost whose turn it is.
_ANSWERED = re.compile(
    r"\n(of course|sure|certainly|here'?s|here is|i'?m happy to|yes,|no,|as an ai|to solve|"
    r"here are|the answer)\b",
    re.IGNORECASE,
)


@dataclass
class Kept:
    """Questions that were kept, and how many were dropped why."""

    questions: list[str]
    dropped: Counter[str]

    def describe(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        return f"{len(self.questions)} kept; dropped: {why or 'none'}"


def fault_of(question: str, *, is_whole: bool = True) -> str | None:
    """What is wrong with a question by itself."""
    text = question.strip()
    words = words_of(text)
    if not is_whole:
        return "cut off"
    if len(text) < _SHORTEST or len(words) < _FEWEST_WORDS:
        return "short"
    if len(text) > _LONGEST:
        return "long"
    if "<|" in text or "\ufffd" in text or _has_controls(text):
        return "marks of the template or broken characters"
    if _ANSWERED.search(text):
        return "answers itself"
    if max(map(len, words)) > _LONGEST_WORD:
        return "no words"
    if repeats(words) > _REPEATED:
        return "loops"
    is_code = "```" in text or "def " in text
    letters = sum(c.isalpha() or c.isspace() for c in text)
    if not is_code and letters < _LETTERS * len(text):
        return "no words"
    if not is_code and len(words) > 8 and language_of(text) is None:
        return "no language"
    return None


def repeats(words: list[str]) -> float:
    """The share of runs of three words that came before; 0 for short texts."""
    runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return 1 - len(set(runs)) / len(runs) if len(runs) >= 12 else 0.0


def kept_of(tried: Iterable[tuple[str, bool]], avoided: Questions) -> Kept:
    """`tried` has texts, and whether each ended by itself. Twins and benchmarks' questions go."""
    dropped: Counter[str] = Counter()
    good: dict[str, str] = {}
    for text, is_whole in tried:
        question = text.strip()
        reason = fault_of(question, is_whole=is_whole)
        plain = " ".join(words_of(question))
        if reason is None and plain in good:
            reason = "said before"
        if reason is None and avoided.is_near(question):
            reason = "near a benchmark's question"
        if reason is None:
            good[plain] = question
        else:
            dropped[reason] += 1
    questions = list(good.values())
    twins = near_duplicates([Text("", q, str(i)) for i, q in enumerate(questions)], _SIMILAR)
    dropped["nearly said before"] += len(twins)
    return Kept([q for i, q in enumerate(questions) if i not in twins], +dropped)


def _has_controls(text: str) -> bool:
    return any(not c.isprintable() and c not in "\n\t" for c in text)


def openings(words: tuple[str, ...], count: int) -> Iterator[str]:
    """What `count` user turns begin with: every other one with nothing, the rest in turn."""
    for number in range(count):
        yield words[number // 2 % len(words)] if number % 2 else ""
