"""Where the trunk's states come from: computed when they are needed, or read from a cache.

Training sees one small protocol and does not know which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headstart.data.records import Record
from headstart.errors import DataError
from headstart.models.unroll import trunk_states
from headstart.train.packing import Row, pack
from headstart.train.parallel import World
from headstart.train.states.cache import StateCache
from headstart.train.states.header import CacheHeader, check_free_space, disk_bill
from headstart.train.states.writer import CacheWriter
from headstart.train.subject import Subject

Say = Callable[[str], None]


class StateSource(Protocol):
    def states(self, row: Row) -> Tensor:
        """[T, D] on the device, of the kind that the head's contract names."""
        ...


@dataclass(frozen=True)
class InProcess:
    """The frozen trunk itself."""

    subject: Subject

    def states(self, row: Row) -> Tensor:
        ids = row.ids.to(self.subject.device)
        return trunk_states(self.subject.trunk, ids, row.documents, self.subject.kind)


@dataclass(frozen=True)
class Cached:
    """States on disk."""

    cache: StateCache
    device: torch.device
    dtype: torch.dtype

    def states(self, row: Row) -> Tensor:
        return torch.cat([self._one(record) for record in row.records]).to(self.device)

    def _one(self, record: Record) -> Tensor:
        found = self.cache.states(record.id, self.dtype)
        if len(found) != len(record.ids):
            raise DataError(
                f"{self.cache.folder} has {len(found)} states of record {record.id}, which has "
                f"{len(record.ids)} tokens. Give another --cache folder, or remove this one."
            )
        return found


def fingerprint(records: Sequence[Record]) -> str:
    """Of the texts that states belong to."""
    state = hashlib.sha256()
    for record in records:
        state.update(f"{record.id} {len(record.ids)}\n".encode())
        state.update(record.ids.tobytes())
    return state.hexdigest()


def cached(
    folder: Path,
    header: CacheHeader,
    subject: Subject,
    records: Sequence[Record],
    *,
    pack_tokens: int,
    world: World,
    say: Say,
) -> Cached:
    """The cache in `folder`, filled first where it is not finished."""
    if not StateCache.is_finished(folder) and world.is_main:
        _fill(folder, header, subject, records, pack_tokens, say)
    world.wait()
    cache = StateCache.open(folder, header, verify=world.is_main)
    return Cached(cache, subject.device, subject.dtype)


def _fill(
    folder: Path,
    header: CacheHeader,
    subject: Subject,
    records: Sequence[Record],
    pack_tokens: int,
    say: Say,
) -> None:
    num_tokens = sum(len(record.ids) for record in records)
    bill = disk_bill(num_tokens, header.hidden_size, header.dtype)
    say(
        f"cached states: {num_tokens} tokens x {header.hidden_size} in {header.dtype} take "
        f"{bill / 1e9:.2f} GB in {folder}"
    )
    check_free_space(folder, bill)
    source = InProcess(subject)
    with CacheWriter(folder, header) as writer:
        for row in pack([r for r in records if r.id not in writer], pack_tokens):
            parts = torch.split(source.states(row), list(row.documents.lengths))
            for record, states in zip(row.records, parts, strict=True):
                writer.add(record.id, states)
        writer.finish()
