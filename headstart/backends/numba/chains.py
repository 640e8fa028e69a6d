"""The head through the compiled kernels: rows of a module, or a chain of drafts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.backends.numba import drafts as kernels
from headstart.backends.numba.forward import Block, joined, matrices, norms, row_layout
from headstart.backends.numba.layers import FloatMatrices, Matrices, RowLayout, runs
from headstart.backends.numba.thread_pool import POOL, new_counters
from headstart.models.mtp import MTPModule
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class Tokens:
    """What is guessed among: an LM head, and the ids of its rows where they are not all."""

    lm_head: Matrices | FloatMatrices
    ids: np.ndarray  # empty: all


@dataclass(frozen=True)
class Chain:
    """A request's drafts: rows that are read before the first, slots that all of them fill."""

    rows: int
    first_position: int
    slots: np.ndarray  # of the rows, then of each draft but the last
    kv_slots: np.ndarray  # what the last row sees, its own slot included
    depths: int

    @property
    def _later(self) -> int:
        return self.depths - 1

    @property
    def first_pass(self) -> tuple[np.ndarray, np.ndarray]:
        return self.slots[: self.rows], self.kv_slots[: len(self.kv_slots) - self._later]


class HeadKernels:
    """One module of a head."""

    def __init__(self, module: MTPModule, trunk: Trunk, slots: int):
        layout = module.layout
        self._embed, self._hides_first = trunk.embed, layout.zero_embed_at_position_0
        self._block = Block.of([module.block], slots, module.rotary or trunk.rotary)
        swaps, both = layout.fuse_order != "embed_first", [module.embed_norm, module.hidden_norm]
        out = module.out_norm
        self._head = kernels.Head(
            self._block.model, norms(both[::-1] if swaps else both), matrices([module.fuse]),
            np.empty(0, np.float32) if out is None else out.factor.numpy(),
            swaps, layout.recycled_hidden == "after_out_norm",
        )  # fmt: skip

    def run(
        self, ids: torch.Tensor, hidden: torch.Tensor, layout: RowLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [rows] and hidden [rows, D] -> the state for the LM head and the recycled one."""
        embedded = self._embedded(ids, layout)
        _, normed, recycled = POOL.run(
            len(ids) * self._block.weights, kernels.run_head,
            new_counters(kernels.num_phases(1)), 0, embedded, hidden.contiguous().numpy(),
            np.empty_like(embedded), self._block.scratch(len(ids)), self._head, layout,
        )  # fmt: skip
        return torch.from_numpy(normed), torch.from_numpy(recycled)

    def draft(
        self, ids: torch.Tensor, hidden: torch.Tensor, chains: Sequence[Chain], tokens: Tokens
    ) -> np.ndarray:
        """The most likely drafts [depths, chains]; those that go deepest come first."""
        positions = [p for c in chains for p in range(c.first_position, c.first_position + c.rows)]
        layout = row_layout([chain.first_pass for chain in chains], positions)
        active = [
            sum(chain.depths > depth for chain in chains) for depth in range(chains[0].depths)
        ]
        embedded = self._embedded(ids, layout)
        shape = (len(active) - 1, len(chains), embedded.shape[1])
        room = kernels.Room(
            np.empty(shape, np.float32),
            np.empty((len(active), len(chains), tokens.lm_head.bias.shape[1]), np.float32),
        )
        work = len(ids) * self._block.weights + sum(active) * tokens.lm_head.packed.size
        result = POOL.run(
            work, kernels.run_chain, new_counters(kernels.num_phases(1) * len(active)), embedded,
            hidden.contiguous().numpy(), np.empty_like(embedded), self._block.scratch(len(ids)),
            self._head, layout, np.cumsum([chain.rows for chain in chains]) - 1, _later(chains),
            np.array(active), self._embed.numpy(), tokens.lm_head, tokens.ids, room,
        )  # fmt: skip
        assert isinstance(result, np.ndarray)
        return result

    def _embedded(self, ids: torch.Tensor, layout: RowLayout) -> np.ndarray:
        embedded: np.ndarray = self._embed[ids].numpy()
        if self._hides_first:
            embedded[layout.positions == 0] = 0
        return embedded


def _later(chains: Sequence[Chain]) -> RowLayout:
    """The rows of the second depth, with the slots of all further ones [depths - 1, chains]."""
    count = len(chains)
    slots = np.zeros((chains[0].depths - 1, count), np.int64)
    for number, chain in enumerate(chains):
        slots[: chain.depths - 1, number] = chain.slots[chain.rows :]
    lengths = [len(chain.kv_slots) for chain in chains]
    begins = np.cumsum([0, *lengths[:-1]])
    seen = [len(chain.first_pass[1]) + 1 for chain in chains]
    return RowLayout(
        np.array([chain.first_position + chain.rows for chain in chains]), slots,
        joined([chain.kv_slots for chain in chains]),
        joined([runs(chain.kv_slots) for chain in chains]),
        begins, begins + np.array(seen), np.arange(count), np.arange(1, count + 1),
    )  # fmt: skip
