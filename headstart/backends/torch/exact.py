"""Arithmetic in which a row's result does not depend on how many rows there are, to the bit.

Libraries choose kernels by shape, and another kernel adds in another order. So the trunk always
runs in blocks of a constant number of rows, filled up with repeated rows, and each row attends by
itself over a copy of exactly its own keys. What is left is that a row's place in the block must
not matter either: that is checked at start on this machine, for every shape of matrix, and a
product that fails is computed row by row. Measured cost: docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headstart.errors import ConfigError
from headstart.models.attention import LayerCache, Seen
from headstart.models.compressed_attention import CompressedAttention
from headstart.models.delta_rule import Rows
from headstart.models.feed_forward import Router
from headstart.models.indexer import Indexer
from headstart.models.linear import MAX_TUNED_ROWS, PRODUCTS, Linear, Stack
from headstart.models.mla import LatentAttention
from headstart.models.row_attention import attend_rows
from headstart.models.row_invariant import Slots
from headstart.models.streams import Shares
from headstart.models.trunk import Trunk

BLOCK_ROWS = MAX_TUNED_ROWS
_TRIALS = 3
# How many rows an expert gets is never constant, and heads have no `Linear` of their own.
_WITH_OWN_PRODUCTS = (Stack, Router, LatentAttention, CompressedAttention, Indexer, Shares)


@dataclass(frozen=True)
class OneRow:
    """Where a row's own K/V goes, and the slots it attends to, its own the last of them."""

    slot: int
    context: Slots


@dataclass(frozen=True)
class ExactContext:
    """One layer's cache for a block of rows; rows beyond `rows` only fill the block up."""

    cache: LayerCache
    rows: list[OneRow]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = q.new_zeros(*q.shape[:2], v.shape[-1])
        for index, row in enumerate(self.rows):  # a row may attend to those before it
            self.cache.keep(row.slot, k[index], v[index])
            result[index] = self._attend_one(q[index], row, window, sinks)
        return result.flatten(1)

    def seen(self, new: torch.Tensor) -> list[Seen]:
        for index, row in enumerate(self.rows):
            self.cache.k[row.slot] = new[index]
        # Copies, as below; a row's context ends with the row, whatever was written further on.
        return [
            Seen(slice(index, index + 1), self.cache.k[row.context].clone())
            for index, row in enumerate(self.rows)
        ]

    def _attend_one(
        self, q: torch.Tensor, row: OneRow, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        # Copies: a slice of the cache may lie at another alignment than the next time.
        keys, values = (part[row.context].clone() for part in (self.cache.k, self.cache.v))
        if window is not None:
            keys, values = keys[-window:].clone(), values[-window:].clone()
        return attend_rows(q.unsqueeze(0), keys, values, sinks=sinks)[0]


def fill_up(rows: list[int]) -> list[int]:
    """A block of constant size: the last row again where there are too few."""
    return rows + rows[-1:] * (BLOCK_ROWS - len(rows))


@torch.inference_mode()
def make_exact(trunk: Trunk) -> dict[tuple[int, int], str]:
    """Give every product a form in which a row's place does not matter; the forms by shape."""
    chosen: dict[tuple[int, int], str] = {}
    for module in trunk.modules():
        if isinstance(module, _WITH_OWN_PRODUCTS):
            module.one_by_one = True
        if not isinstance(module, Linear):
            continue
        shape = (module.weight.shape[0], module.weight.shape[1])
        if shape not in chosen:
            forms = (n for n, f in PRODUCTS.items() if is_invariant(f, module.weight))
            chosen[shape] = next(forms)
        # Fewer rows than a block come from drafting only, which need not be exact.
        module.plan = ("rows",) * (BLOCK_ROWS - 1) + (chosen[shape],)
    _check_places(trunk)
    return chosen


class _Alone:
    """A row that sees only itself: its own value is what attention gives."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).flatten(1)

    def seen(self, new: torch.Tensor) -> list[Seen]:
        return [Seen(slice(row, row + 1), new[row : row + 1]) for row in range(len(new))]

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, state: int = 0) -> torch.Tensor:
        return rows * weight[:, -1]

    def recur(self, rows: Rows) -> torch.Tensor:
        return rows.v


def _check_places(trunk: Trunk) -> None:
    """Norms, rotation and activation, too: equal rows must stay equal through the whole trunk."""
    contexts = [_Alone() for _ in trunk.layers]
    for token in range(_TRIALS):
        ids = torch.full((BLOCK_ROWS,), token % trunk.config.vocab)
        positions = torch.full((BLOCK_ROWS,), token % trunk.rotary.num_positions)
        states = trunk(ids, positions, contexts)
        logits = trunk.logits(trunk.final_norm(states))
        if not all(torch.equal(part, part[:1].expand_as(part)) for part in (states, logits)):
            raise ConfigError(
                f"exact was asked for, and with {torch.get_num_threads()} threads equal rows get "
                "different bits on this machine. Give threads 1, or leave exact out."
            )


def is_invariant(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], weight: torch.Tensor
) -> bool:
    """Whether a row gives the same bits at every place of a block, whatever the others are."""
    draw = torch.Generator().manual_seed(0)
    size = (BLOCK_ROWS, weight.shape[1])
    for _ in range(_TRIALS):
        row = torch.randn(size[1], generator=draw).to(weight.dtype)
        first = None
        for place in range(BLOCK_ROWS):
            block = torch.randn(size, generator=draw).to(weight.dtype)
            block[place] = row
            found = product(block, weight)[place]
            if first is not None and not torch.equal(first, found):
                return False
            first = found
    return True
