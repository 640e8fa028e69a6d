"""The trunk's states of texts: from memory, from what was kept on disk, or computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headstart.data.records import Record
from headstart.learn.state_files import StateWriter, StoredStates
from headstart.train.packing import Row
from headstart.train.states.source import InProcess


class RememberedStates:
    """States by record; those that were not used for longest make room in memory.

    What is on disk is read each time, from the system's own cache.
    """

    def __init__(self, source: InProcess, max_bytes: int):
        """max_bytes: of memory."""
        self._source, self._max_bytes = source, max_bytes
        self._stored: StoredStates | None = None
        self._base: StateWriter | None = None
        self._known: OrderedDict[str, Tensor] = OrderedDict()
        self.num_bytes = 0
        self.num_computed = 0  # texts

    def use_disk(self, stored: StoredStates, base: StateWriter | None) -> None:
        """stored: what is read. base: takes what is computed ahead."""
        self._stored, self._base = stored, base

    def states(self, row: Row) -> Tensor:
        """[T, D] on the device."""
        records = {record.id: record for record in row.records}  # one may come twice
        found = {
            name: states
            for name, record in records.items()
            if (states := self._find(record)) is not None
        }
        made = self._computed([own for name, own in records.items() if name not in found])
        for name, states in made.items():
            self._keep(name, states.clone())  # a view would hold the whole row
        found |= made
        return torch.cat([found[record.id] for record in row.records])

    def prepare(self, records: Sequence[Record]) -> bool:
        """Have states of these at hand from now on; False where there is no room for them."""
        wanted = [record for record in records if not self._is_stored(record)]
        made = self._computed([record for record in wanted if record.id not in self._known])
        for record in wanted:
            states = made.get(record.id)
            states = self._known[record.id] if states is None else states
            if self._write(record, states) or record.id in self._known:
                continue
            if self.num_bytes + states.nbytes > self._max_bytes:
                return False
            self._keep(record.id, states.clone())
        return True

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Texts that are gone from the store need no memory."""
        for name in [name for name in self._known if is_gone(name)]:
            self._drop(name)

    def _find(self, record: Record) -> Tensor | None:
        states = self._known.get(record.id)
        if states is not None:
            self._known.move_to_end(record.id)
            return states
        found = None if self._stored is None else self._stored.find(record)
        if found is None:
            return None
        frozen = self._source.frozen
        return found.to(frozen.device, frozen.dtype)

    def _is_stored(self, record: Record) -> bool:
        return self._stored is not None and self._stored.has(record)

    def _computed(self, records: Sequence[Record]) -> dict[str, Tensor]:
        if not records:
            return {}
        self.num_computed += len(records)
        lengths = [len(record.ids) for record in records]
        parts = torch.split(self._source.states(Row(tuple(records))), lengths)
        return {record.id: part for record, part in zip(records, parts, strict=True)}

    def _write(self, record: Record, states: Tensor) -> bool:
        """Whether they are on disk now."""
        if self._base is None:
            return False
        try:
            return self._base.add(record.id, self._source.frozen.kind, states) > 0
        except OSError:
            self._base = None  # the disk is full: memory has to do
            return False

    def _keep(self, name: str, states: Tensor) -> None:
        self._known[name] = states
        self.num_bytes += states.nbytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._known)))

    def _drop(self, name: str) -> None:
        self.num_bytes -= self._known.pop(name).nbytes
