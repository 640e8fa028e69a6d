"""Rows of prompts that join a round's trunk pass, in fixed tensors, so that graphs can hold it.

The rows of a request are taken in groups. Each group attends as a request with so many new rows
would: over the paged cache, in which the rows before it already are. What is left of its last group
is filled up with rows that write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headstart.backends.cuda.forward import GROUP_ROWS, Rows
from headstart.backends.cuda.round_model import RoundModel
from headstart.backends.rows import TrunkRows, pinned_to
from headstart.models.attention import LayerCache

MOST_GROUPS = 32


def num_groups(rows: Sequence[TrunkRows]) -> int:
    """Groups that the rows of these requests need."""
    return sum(-(-len(own.tokens) // GROUP_ROWS) for own in rows)


class JoinedRows:
    """Room for `MOST_GROUPS` groups, of requests with up to `max_blocks` blocks."""

    def __init__(self, max_blocks: int, hidden: int, dtype: torch.dtype, device: torch.device):
        def numbers(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(MOST_GROUPS, *shape, dtype=kind, device=device)

        self._ids = numbers(torch.int64, GROUP_ROWS)
        self._positions = numbers(torch.int64, GROUP_ROWS)
        self._kv_slots = numbers(torch.int32, GROUP_ROWS)
        self._seen = numbers(torch.int32)  # slot of each group's first row, -1: there is none
        # Rows that fill up a group look past the blocks of their request, at the first one.
        self._tables = numbers(torch.int32, max_blocks + GROUP_ROWS)
        self.stream = numbers(dtype, GROUP_ROWS, hidden).flatten(0, 1)
        self.normed = numbers(dtype, GROUP_ROWS, hidden).flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())

    def fill(self, requests: Sequence[TrunkRows], block_size: int, size: int) -> None:
        """Take the rows of requests for a pass over `size` groups."""
        rows = size * GROUP_ROWS
        ids, positions = np.zeros((2, rows), np.int64)
        kv_slots, seen = np.full(rows, -1, np.int32), np.full(size, -1, np.int32)
        width = max(len(own.blocks) for own in requests) + -(-GROUP_ROWS // block_size)
        tables = np.zeros((size, min(width, self._tables.shape[1])), np.int32)
        for first, own in zip(starts_of(requests), requests, strict=True):
            slots = np.arange(own.start, own.start + len(own.tokens))
            blocks, last = np.array(own.blocks, np.int32), first + len(own.tokens)
            ids[first:last], positions[first:last] = own.tokens, slots
            kv_slots[first:last] = blocks[slots // block_size] * block_size + slots % block_size
            groups = slice(first // GROUP_ROWS, -(-last // GROUP_ROWS))
            seen[groups] = slots[::GROUP_ROWS]
            tables[groups, : len(blocks)] = blocks[: tables.shape[1]]
        for target, values in (
            (self._ids, ids), (self._positions, positions), (self._kv_slots, kv_slots),
            (self._seen, seen),
        ):  # fmt: skip
            target.flatten()[: len(values)] = pinned_to(torch.from_numpy(values), target.device)
        found = pinned_to(torch.from_numpy(tables), self._tables.device)
        self._tables[:size, : tables.shape[1]] = found

    def rows(self, model: RoundModel, groups: int) -> tuple[Tensor, Rows]:
        """Token ids, and where the rows of so many groups go."""
        placed = (
            self._positions[:groups].flatten(), self._kv_slots[:groups].flatten(),
            self._seen[:groups],
        )  # fmt: skip
        where = model.rows(placed, self._tables[:groups], GROUP_ROWS, first_slot=0)
        return self._ids[:groups].flatten(), where


def starts_of(requests: Sequence[TrunkRows]) -> list[int]:
    """The first row of each request, which begins a group."""
    found, start = [], 0
    for own in requests:
        found.append(start)
        start += GROUP_ROWS * num_groups([own])
    return found


def joined(first: Rows, second: Rows) -> Rows:
    """Rows of one kind and those of another after them, which attend in their own way."""
    count = len(first.positions)

    def attend(q: Tensor, cache: LayerCache) -> Tensor:
        return torch.cat([first.attend(q[:count], cache), second.attend(q[count:], cache)])

    return Rows(
        torch.cat([first.positions, second.positions]),
        torch.cat([first.kv_slots, second.kv_slots]),
        attend,
    )
