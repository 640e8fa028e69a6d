"""The trunk's states of texts that are learned more than once: kept in memory, within bounds."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from headstart.train.packing import Row
from headstart.train.states.source import InProcess


class RememberedStates:
    """States by record; those that were not used for longest make room."""

    def __init__(self, source: InProcess, max_bytes: int):
        self._source, self._max_bytes = source, max_bytes
        self._known: OrderedDict[str, Tensor] = OrderedDict()
        self.num_bytes = 0

    def states(self, row: Row) -> Tensor:
        """[T, D] on the device."""
        missing = tuple(record for record in row.records if record.id not in self._known)
        made: dict[str, Tensor] = {}
        if missing:
            lengths = [len(record.ids) for record in missing]
            parts = torch.split(self._source.states(Row(missing)), lengths)
            made = {record.id: part for record, part in zip(missing, parts, strict=True)}
        found = []
        for record in row.records:
            states = made.get(record.id)
            if states is None:
                self._known.move_to_end(record.id)
                states = self._known[record.id]
            found.append(states)
        for name, states in made.items():
            self._keep(name, states)
        return torch.cat(found)

    def forget(self, names: set[str]) -> None:
        for name in names & set(self._known):
            self._drop(name)

    def _keep(self, name: str, states: Tensor) -> None:
        self._known[name] = states.clone()  # a view would hold the whole row
        self.num_bytes += states.nbytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._known)))

    def _drop(self, name: str) -> None:
        self.num_bytes -= self._known.pop(name).nbytes
