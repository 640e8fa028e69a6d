"""A draft vocabulary: the token ids that a head may propose.

The trunk keeps its whole vocabulary, so a draft vocabulary changes how fast drafts are made and
how often they are right, never the text. Ids are ascending and unique; row i of the reduced LM
head is token ids[i].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headstart.errors import DataError, some

ALL = "all"  # the name of a map that was counted over every language
WHOLE_NAMES = ("none", "full")  # what a request says to draft from the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class DraftVocab:
    """Ids with what is known of them. None: the file that they came from does not say."""

    ids: tuple[int, ...]
    name: str = "default"
    language: str = ""  # of the answers that were counted; empty: of any, or by users' labels
    vocab_size: int | None = None  # rows of the trunk's LM head
    tokenizer_sha: str | None = None
    coverage: float | None = None  # share of held-out answer tokens inside
    forced: int = 0  # ids that are in whatever the counts say

    def __post_init__(self) -> None:
        if not self.ids:
            raise DataError(f"draft vocabulary {self.name!r} is empty; it needs one token at least")
        if not self.name or self.name in WHOLE_NAMES:
            raise DataError(
                f"a draft vocabulary is called {self.name!r}; that stands for the whole "
                f"vocabulary. Give it another name."
            )
        if self.ids[0] < 0:
            raise DataError(f"draft vocabulary {self.name!r} holds {self.ids[0]}; ids are 0 or up")
        if any(low >= high for low, high in pairwise(self.ids)):
            raise DataError(f"draft vocabulary {self.name!r}: ids must be ascending and unique")
        if self.vocab_size is not None and self.ids[-1] >= self.vocab_size:
            raise DataError(self._outside(self.vocab_size))

    @classmethod
    def of(cls, ids: Iterable[int], **facts: Any) -> DraftVocab:
        """From ids in any order; DataError if one is there twice."""
        counts = Counter(ids)
        twice = sorted(token for token, times in counts.items() if times > 1)
        if twice:
            raise DataError(
                f"draft vocabulary {facts.get('name', 'default')!r} holds {some(twice)} more than "
                f"once; every id may be there once. Make the file again."
            )
        return cls(ids=tuple(sorted(counts)), **facts)

    def check(self, *, vocab_size: int, tokenizer_sha: str | None, where: str = "") -> None:
        """DataError unless these ids mean the same tokens in a model of that kind."""
        found = where or f"draft vocabulary {self.name!r}"
        if self.vocab_size is not None and self.vocab_size != vocab_size:
            raise DataError(
                f"{found} was made for a vocabulary of {self.vocab_size} tokens; the model has "
                f"{vocab_size}. Make one for this model with `headstart vocab`."
            )
        if self.ids[-1] >= vocab_size:
            raise DataError(f"{where}: {self._outside(vocab_size)}".removeprefix(": "))
        if None not in (self.tokenizer_sha, tokenizer_sha) and self.tokenizer_sha != tokenizer_sha:
            raise DataError(
                f"{found} was made with another tokenizer ({_short(self.tokenizer_sha)}, the "
                f"model's is {_short(tokenizer_sha)}), so its ids mean other tokens. Make one for "
                f"this model with `headstart vocab`."
            )

    def _outside(self, vocab_size: int) -> str:
        bad = [token for token in self.ids if token >= vocab_size]
        return (
            f"draft vocabulary {self.name!r} holds {some(bad)}; the model has tokens 0 to "
            f"{vocab_size - 1}. It comes from another model: make one with `headstart vocab`."
        )


def to_d2t(ids: Sequence[int]) -> list[int]:
    """Offsets as EAGLE-3 checkpoints store them: token of draft row i is i + d2t[i]."""
    return [token - row for row, token in enumerate(ids)]


def from_d2t(offsets: Sequence[int]) -> list[int]:
    return [row + offset for row, offset in enumerate(offsets)]


def to_t2d(ids: Iterable[int], vocab_size: int) -> list[bool]:
    """For every token of the trunk whether the draft has it."""
    chosen = set(ids)
    return [token in chosen for token in range(vocab_size)]


def from_t2d(flags: Sequence[bool]) -> list[int]:
    return [token for token, is_in in enumerate(flags) if is_in]


def _short(sha: str | None) -> str:
    return (sha or "").rpartition(":")[2][:12]
