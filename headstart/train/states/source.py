"""Where the trunk's states come from: computed when they are needed, or read from a cache.

Training sees one small protocol and does not know which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headstart.data.fingerprints import template_sha
from headstart.data.records import Record
from headstart.errors import DataError
from headstart.heads.operation import megabytes
from headstart.models.unroll import trunk_states
from headstart.train.frozen_model import FrozenModel
from headstart.train.packing import Row, pack
from headstart.train.parallel import World
from headstart.train.states.cache import StateCache
from headstart.train.states.header import CacheHeader, check_free_space, disk_bill
from headstart.train.states.writer import CacheWriter

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


class StateSource(Protocol):
    def states(self, row: Row) -> Tensor:
        """[T, D] on the device, of the kind that the head's contract names."""
        ...


@dataclass(frozen=True)
class InProcess:
    """The frozen trunk itself."""

    frozen: FrozenModel

    def states(self, row: Row) -> Tensor:
        ids = row.ids.to(self.frozen.device)
        return trunk_states(self.frozen.trunk, ids, row.documents, self.frozen.kind)


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
    """Of the texts that states belong to: which records, the longest, and their tokens.

    Apart, so that a refusal can say which of them has changed.
    """
    names, tokens = hashlib.sha256(), hashlib.sha256()
    for record in records:
        names.update(f"{record.id}\n".encode(errors="backslashreplace"))
        tokens.update(f"{len(record.ids)}\n".encode())
        tokens.update(record.ids.tobytes())
    longest = max((len(record.ids) for record in records), default=0)
    return f"{names.hexdigest()[:16]}-{longest}-{tokens.hexdigest()}"


def completed(header: CacheHeader, frozen: FrozenModel) -> CacheHeader:
    """With the rest of the contract, which is known when the model is loaded."""
    assert frozen.built.head is not None
    layout = frozen.built.head.layout
    return replace(
        header,
        template_sha=template_sha(frozen.checkpoint),
        fuse_order=layout.fuse_order,
        recycled_hidden=layout.recycled_hidden,
        compute_dtype=str(frozen.dtype).removeprefix("torch."),
    )


def cached(
    folder: Path,
    header: CacheHeader,
    frozen: FrozenModel,
    records: Sequence[Record],
    *,
    pack_tokens: int,
    world: World,
    say: Say,
    is_stopped: Callable[[], bool] = lambda: False,
    progress: Progress = lambda done, total: None,
) -> Cached:
    """The cache in `folder`, filled first where it is not finished.

    KeyboardInterrupt if it is stopped meanwhile: what was stored is kept and gone on with.
    `progress` hears of tokens done, and of how many.
    """
    header = completed(header, frozen)
    is_cut = False
    if not StateCache.is_finished(folder) and world.is_main:
        is_cut = not _fill(folder, header, frozen, records, pack_tokens, say, is_stopped, progress)
    if world.any(is_cut, frozen.device):  # the others wait here
        raise KeyboardInterrupt
    cache = StateCache.open(folder, header, verify=world.is_main)
    return Cached(cache, frozen.device, frozen.dtype)


def _fill(
    folder: Path,
    header: CacheHeader,
    frozen: FrozenModel,
    records: Sequence[Record],
    pack_tokens: int,
    say: Say,
    is_stopped: Callable[[], bool],
    progress: Progress,
) -> bool:
    """Whether the cache is finished now."""
    num_tokens = sum(len(record.ids) for record in records)
    bill = disk_bill(num_tokens, header.hidden_size, header.dtype)
    say(
        f"cached states: {num_tokens} tokens x {header.hidden_size} in {header.dtype} take "
        f"{megabytes(bill)} in {folder}"
    )
    check_free_space(folder, bill)
    source = InProcess(frozen)
    with CacheWriter(folder, header) as writer:
        done = sum(len(record.ids) for record in records if record.id in writer)
        for row in pack([r for r in records if r.id not in writer], pack_tokens):
            if is_stopped():
                say(
                    f"stopped while caching states: {len(writer)} of {len(records)} records are in "
                    f"{folder}; run the same command to go on"
                )
                return False
            parts = torch.split(source.states(row), list(row.documents.lengths))
            for record, states in zip(row.records, parts, strict=True):
                writer.add(record.id, states)
            done += row.documents.num_rows
            progress(done, num_tokens)
        writer.finish()
    return True
