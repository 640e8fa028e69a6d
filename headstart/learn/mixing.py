"""What a training step sees: newest texts, all texts, and the dataset of the first tuning.

Each source is a deck: shuffled, dealt to its end, shuffled again. So every text comes about as
often as its neighbours, and new ones come with the next deck.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.data.records import Record

NEWEST = 0.5  # of texts by age: those count as new
NEW_SHARE = 0.5  # of what comes from the store, dealt from the new ones alone


class Deck:
    """Records in random order, again and again."""

    def __init__(self, records: Sequence[Record], rng: random.Random):
        self._records, self._rng = records, rng
        self._left: list[Record] = []

    def deal(self) -> Record:
        if not self._left:
            self._left = self._rng.sample(self._records, len(self._records))
        return self._left.pop()

    def __len__(self) -> int:
        return len(self._records)


class Mix:
    """Decks of the store and of the base; `base_share` of the tokens are the base's.

    `weights` of kinds say how much oftener than others their texts come; 1 where none is given.
    """

    def __init__(self, base: Sequence[Record], base_share: float, seed: int = 0):
        self._rng = random.Random(seed)
        self.base_share = base_share
        self.weights: dict[str, float] = {}
        self._base = Deck(base, self._rng)
        self._all: dict[str, Deck] = {}  # by kind
        self._new: dict[str, Deck] = {}

    def replace(self, texts: Sequence[Record]) -> None:
        """The store's texts, oldest first."""
        self._all = self._decks(texts)
        self._new = self._decks(texts[int(len(texts) * (1 - NEWEST)) :])

    def step(self, num_tokens: int) -> list[Record]:
        """Records with about `num_tokens` tokens to learn; at least one."""
        result: list[Record] = []
        from_base = from_store = 0
        while from_base + from_store < num_tokens:
            is_base = len(self._base) > 0 and (
                not self._all
                or from_base < self.base_share * (from_base + from_store)
                or (not result and self._rng.random() < self.base_share)
            )
            record = self._base.deal() if is_base else self._deal()
            result.append(record)
            learned = int(record.mask.sum())
            from_base += learned if is_base else 0
            from_store += 0 if is_base else learned
        return result

    def _decks(self, texts: Sequence[Record]) -> dict[str, Deck]:
        kinds: dict[str, list[Record]] = {}
        for text in texts:
            kinds.setdefault(text.category, []).append(text)
        return {kind: Deck(own, self._rng) for kind, own in kinds.items()}

    def _deal(self) -> Record:
        decks = self._new if self._rng.random() < NEW_SHARE else self._all
        chances = [len(deck) * self.weights.get(kind, 1.0) for kind, deck in decks.items()]
        return self._rng.choices(list(decks.values()), chances)[0].deal()
