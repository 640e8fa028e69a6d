"""Which records a step sees, and how they are laid into packed rows.

Every process makes the same plan from the lengths, the seed and the epoch alone. So the number of
loss rows in a step is known everywhere without asking around, the plan does not depend on how many
processes share the work, and a resumed run needs nothing but the number of steps done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headstart.data.records import Record
from headstart.heads.operation import counted
from headstart.models.documents import Documents
from headstart.train.options import TrainOptions

FIRST_LABEL = 2  # depth 1 at the first token of a document predicts the third


@dataclass(frozen=True)
class Row:
    """Records that lie one after another in one pass."""

    records: tuple[Record, ...]

    @property
    def documents(self) -> Documents:
        return Documents(tuple(len(record.ids) for record in self.records))

    @property
    def ids(self) -> torch.Tensor:
        """[T] token ids."""
        return torch.from_numpy(np.concatenate([record.ids for record in self.records])).long()

    @property
    def mask(self) -> torch.Tensor:
        """[T] bool: which tokens the head is to learn."""
        return torch.from_numpy(np.concatenate([record.mask for record in self.records]))

    @property
    def names(self) -> list[str]:
        return [record.id for record in self.records]


@dataclass(frozen=True)
class Kept:
    """Records fit for training, and what became of the others."""

    records: list[Record]
    num_cut: int = 0
    num_dropped: int = 0  # too long
    num_silent: int = 0  # without a token to learn

    def describe(self) -> str:
        tokens = sum(len(record.ids) for record in self.records)
        learned = sum(int(record.mask.sum()) for record in self.records)
        parts = [
            f"{counted(len(self.records), 'record')}, {tokens} tokens, {learned} of them to learn"
        ]
        for count, what in (
            (self.num_cut, "cut to the longest length"),
            (self.num_dropped, "dropped as too long"),
            (self.num_silent, "left out without tokens to learn"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return "; ".join(parts)


def fit(records: Sequence[Record], max_len: int, long_records: str) -> Kept:
    """Cut or drop what is too long, and what is behind the last token to learn."""
    kept, num_cut, num_dropped, num_silent = [], 0, 0, 0
    for record in records:
        if len(record.ids) > max_len:
            if long_records == "drop":
                num_dropped += 1
                continue
            num_cut += 1
        marked = np.flatnonzero(record.mask[:max_len])
        if not len(marked) or marked[-1] < FIRST_LABEL:
            num_silent += 1
            continue
        kept.append(_shortened(record, int(marked[-1]) + 1))
    return Kept(kept, num_cut, num_dropped, num_silent)


def plan_epoch(records: Sequence[Record], options: TrainOptions, epoch: int) -> list[list[Row]]:
    """The optimiser steps of an epoch, each a list of packed rows.

    The records are shuffled, cut into steps of about equal size, and each step's records packed
    longest first.
    """
    assert records, "a plan without records is refused"
    order = np.random.default_rng([options.seed, epoch]).permutation(len(records))
    weights = np.array([len(records[i].ids) if options.batch_tokens else 1 for i in order])
    size = options.batch_tokens or options.batch_sequences
    assert size, "options are resolved before training"
    count = min(len(records), -(-int(weights.sum()) // size))
    # A record goes to the step in which its middle lies, so that steps are about equally full.
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    steps: list[list[Record]] = [[] for _ in range(count)]
    for index, place in zip(order, middles, strict=True):
        steps[int(place * count)].append(records[index])
    return [pack(step, options.pack_tokens) for step in steps if step]


def pack(records: Sequence[Record], pack_tokens: int) -> list[Row]:
    """Rows of at most `pack_tokens` (or one record, if longer), filled longest first."""
    bins: list[list[Record]] = []
    room: list[int] = []
    for record in sorted(records, key=lambda record: -len(record.ids)):
        size = len(record.ids)
        place = next((i for i, left in enumerate(room) if left >= size), None)
        if place is None:
            bins.append([])
            room.append(pack_tokens)
            place = len(bins) - 1
        bins[place].append(record)
        room[place] -= size
    return [Row(tuple(group)) for group in bins]


def _shortened(record: Record, length: int) -> Record:
    if length == len(record.ids):
        return record
    return replace(record, ids=record.ids[:length], mask=record.mask[:length])
