"""Trunk passes in which rows of prompts follow those of a round, in fixed tensors for graphs.

Rows lie one after another without gaps: first the newest token and the drafts of every request that
decodes, then the rows of prompts, then as many blank ones as a captured size has room for. So a
pass multiplies hardly more rows than there are. A round's rows are placed by a kernel, the others
by the host.

Rows of a prompt attend in groups. Each group attends as a request with so many new rows would: over
the paged cache, in which the rows before it already are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headstart.backends.cuda.attending import GROUP_ROWS
from headstart.backends.cuda.kernels.attention import Packed
from headstart.backends.rows import TrunkRows, pinned_to

MOST_GROUPS = 64
MOST_JOINED_ROWS = MOST_GROUPS * GROUP_ROWS
# Sizes that passes are captured for: a few rows more than there are cost less than another capture.
FINE, _COARSE, _FINE_UP_TO = 64, 128, 1024
# Of these some are captured at the start, each at most so much larger than the one before, so that
# a pass need not wait for its own.
AS_MANY_ROWS = 1.25
_INTERPRETED = 4  # the step on a CPU, where a row takes milliseconds


def num_groups(rows: Sequence[TrunkRows]) -> int:
    """Groups that the rows of these requests need: every request begins one."""
    return sum(-(-len(own.tokens) // GROUP_ROWS) for own in rows)


def num_rows(rows: Sequence[TrunkRows]) -> int:
    return sum(len(own.tokens) for own in rows)


def captured_rows(rows: int, device: torch.device) -> int:
    """The smallest captured size with room for so many rows."""
    step = _step(rows, device)
    return -(-rows // step) * step


def most_captured(rows: int, device: torch.device) -> int:
    """The largest captured size with at most so many rows; 0: none has so few."""
    return rows - rows % _step(rows, device)


def _step(rows: int, device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED
    return FINE if rows <= _FINE_UP_TO else _COARSE


def captured_sizes(device: torch.device) -> list[int]:
    """Of passes over prompts alone."""
    return sorted({captured_rows(rows, device) for rows in range(1, MOST_JOINED_ROWS + 1)})


def first_sizes(device: torch.device) -> list[int]:
    """Those of them that passes beside a round are captured for at the start."""
    sizes = captured_sizes(device)
    found = sizes[:1]
    while found[-1] < sizes[-1]:
        near = [size for size in sizes if found[-1] < size <= AS_MANY_ROWS * found[-1]]
        found.append(near[-1] if near else next(size for size in sizes if size > found[-1]))
    return found


def joinable_rows(counts: Sequence[int]) -> int:
    """Rows, of requests with so many each, that there are groups for."""
    groups, rows = MOST_GROUPS, 0
    for count in counts:
        taken = min(count, groups * GROUP_ROWS)
        rows, groups = rows + taken, groups - -(-taken // GROUP_ROWS)
    return rows


def best_rows(own: int, wanted: int, seconds: Mapping[int, float]) -> int:
    """How many of `wanted` rows join `own` in a pass whose time for each is the least.

    At least half of them; `seconds` are those of captured passes by rows, in their order. Sizes
    that were not timed are not chosen, unless the engine is too small for the usual ones.
    """
    total = own + wanted
    if total > max(seconds, default=0) < MOST_JOINED_ROWS:
        return wanted
    sizes = [size for size in seconds if size >= own + (wanted + 1) // 2]
    last = next((index for index, size in enumerate(sizes) if size >= total), len(sizes))
    if not sizes:
        return wanted
    best = min(sizes[: last + 1], key=lambda size: seconds[size] / min(size, total))
    return min(wanted, best - own)


class PackedRows:
    """Room for a pass with `decode_rows` of a round and `MOST_JOINED_ROWS` others.

    `width`: what attention gives for a row at most; `max_blocks`: of a request; `places`: rows that
    all requests of a round have at most.
    """

    def __init__(
        self, decode_rows: int, *, places: int = 0, max_blocks: int, hidden: int, width: int,
        dtype: torch.dtype, device: torch.device,
    ):  # fmt: skip
        most = captured_rows(decode_rows + MOST_JOINED_ROWS, device)

        def numbers(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.ids, self.positions = numbers(torch.int64, most), numbers(torch.int64, most)
        self.kv_slots = numbers(torch.int32, most)
        self.starts = numbers(torch.int32, MOST_GROUPS)  # the first row of each group,
        self.counts = numbers(torch.int32, MOST_GROUPS)  # rows of it,
        self.seen = numbers(torch.int32, MOST_GROUPS)  # the slot of the first; -1: no group
        self.tables = numbers(torch.int32, MOST_GROUPS, max_blocks)
        # Where requests of a round have different numbers of rows: the place of a row among as many
        # of each, and the row at each place.
        self.sources, self.places = numbers(torch.int64, most), numbers(torch.int64, places)
        self.stream, self.normed = numbers(dtype, most, hidden), numbers(dtype, most, hidden)
        # Blank rows are written by no kernel, and keep what finite numbers were there.
        self.attended = numbers(dtype, most, width)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())

    @property
    def row_bytes(self) -> int:
        """What a row more takes."""
        by_row = (
            self.ids, self.positions, self.kv_slots, self.sources, self.stream, self.normed,
            self.attended,
        )  # fmt: skip
        return sum(tensor[:1].nbytes for tensor in by_row)

    def fill(
        self, first: int, requests: Sequence[TrunkRows], block_size: int, *, rows: int, groups: int
    ) -> None:
        """Take the rows of `requests`, from row `first` on, for a pass of a captured size."""
        ids, positions = np.zeros((2, rows - first), np.int64)
        kv_slots = np.full(rows - first, -1, np.int32)
        starts, counts = np.zeros((2, groups), np.int32)
        seen = np.full(groups, -1, np.int32)
        tables = np.zeros((groups, max(len(own.blocks) for own in requests)), np.int32)
        group = 0
        for at, own in zip(starts_of(requests), requests, strict=True):
            count = len(own.tokens)
            slots = np.arange(own.start, own.start + count)
            blocks = np.array(own.blocks, np.int32)
            ids[at : at + count], positions[at : at + count] = own.tokens, slots
            kv_slots[at : at + count] = blocks[slots // block_size] * block_size + (
                slots % block_size
            )
            begins = np.arange(0, count, GROUP_ROWS)
            end = group + len(begins)
            starts[group:end], seen[group:end] = first + at + begins, own.start + begins
            counts[group:end] = np.minimum(count - begins, GROUP_ROWS)
            tables[group:end, : len(blocks)] = blocks
            group = end
        for target, values in (
            (self.ids[first:rows], ids), (self.positions[first:rows], positions),
            (self.kv_slots[first:rows], kv_slots), (self.starts[:groups], starts),
            (self.counts[:groups], counts), (self.seen[:groups], seen),
            (self.tables[:groups, : tables.shape[1]], tables),
        ):  # fmt: skip
            target.copy_(pinned_to(torch.from_numpy(values), target.device))

    def of_requests(self, rows: int, num_rows: int) -> Packed:
        """Of a pass of so many rows those of a round: `num_rows` of each request.

        They attend before those of prompts: what indices without a request make zero follows.
        """
        return Packed(num_rows, self.attended[:rows])

    def of_groups(self, rows: int, groups: int) -> Packed:
        """Of a pass of so many rows those of prompts."""
        result = self.attended[:rows]
        return Packed(GROUP_ROWS, result, self.starts[:groups], self.counts[:groups])


def starts_of(requests: Sequence[TrunkRows]) -> list[int]:
    """The first row of each request among those of all."""
    return [0, *accumulate(len(own.tokens) for own in requests)][:-1]
