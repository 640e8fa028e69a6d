"""Which tokens the model writes: counts over its own answers, by group, and the most frequent.

An answer is anything with ids, a mask and a category; only masked tokens count, since a head
drafts nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from headstart.vocab.draft_vocab import ALL
from headstart.vocab.languages import language_of
from headstart.vocab.sizes import check_sizes

_CHUNK_CHARACTERS, _LANGUAGE_TOKENS = 4000, 2000

Counts = Mapping[int, int]
GroupOf = Callable[["Answer"], str]
Decode = Callable[[list[int]], str]


class Answer(Protocol):
    """One record of a data set, or of anything else that was written by the model."""

    @property
    def ids(self) -> Any: ...

    @property
    def mask(self) -> Any: ...

    @property
    def category(self) -> str: ...


def answer_ids(answer: Answer) -> list[int]:
    """The masked tokens."""
    import numpy as np

    chosen = np.asarray(answer.ids)[np.asarray(answer.mask, dtype=bool)]
    return [int(token) for token in chosen]


def by_language(decode: Decode) -> GroupOf:
    """Groups answers by the language of their text; its beginning tells."""
    return lambda answer: language_of(decode(answer_ids(answer)[:_LANGUAGE_TOKENS]))


def by_category(answer: Answer) -> str:
    """Groups answers by the label that their prompt has."""
    return answer.category or ALL


def together(answer: Answer) -> str:
    return ALL


def count(answers: Iterable[Answer], group_of: GroupOf) -> dict[str, Counter[int]]:
    """How often each token was written, by group."""
    counts: dict[str, Counter[int]] = {}
    for answer in answers:
        counts.setdefault(group_of(answer), Counter()).update(answer_ids(answer))
    return {name: found for name, found in counts.items() if found}


def count_text(
    text: str, encode: Callable[[str], list[int]], group: str | Callable[[str], str]
) -> dict[str, Counter[int]]:
    """The same for a text that the model did not write, piece by piece; `group` may be a name."""
    counts: dict[str, Counter[int]] = {}
    for piece in pieces(text):
        name = group if isinstance(group, str) else group(piece)
        counts.setdefault(name, Counter()).update(encode(piece))
    return counts


def pieces(text: str) -> Iterator[str]:
    """A long text cut between lines, so that each piece has one language, mostly."""
    lines: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= _CHUNK_CHARACTERS:
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def merged(*many: Mapping[str, Counter[int]]) -> dict[str, Counter[int]]:
    """Counts of several sources, added group by group."""
    result: dict[str, Counter[int]] = {}
    for counts in many:
        for name, found in counts.items():
            result.setdefault(name, Counter()).update(found)
    return result


def rank(counts: Counts, *, size: int, forced: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    """`size` ids, ascending: the forced ones, then the most frequent; ties to the lowest id."""
    check_sizes([size], vocab_size, len(forced))
    free = (token for token in range(vocab_size) if token not in forced)
    best = sorted(free, key=lambda token: (-counts.get(token, 0), token))
    return tuple(sorted([*forced, *best[: size - len(forced)]]))


def coverage(ids: Iterable[int], counts: Counts) -> float | None:
    """Share of counted tokens that are among `ids`; None where nothing was counted."""
    total = sum(counts.values())
    return sum(counts.get(token, 0) for token in ids) / total if total else None
