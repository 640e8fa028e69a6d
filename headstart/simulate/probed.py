"""What the probe of contracts looks at: a trunk's choices, and drafts under each contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from headstart.families.base import HeadLayout
from headstart.models.attention import LayerCache, PagedContext, Span, empty_cache
from headstart.models.documents import Documents
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import SlotRecurrence, StateSpan, empty_states
from headstart.models.streamed_pangu import StreamedPangu
from headstart.models.trunk import Trunk
from headstart.models.unroll import StateKind, trunk_states, unroll


class Subject(Protocol):
    """A trunk and its head, as far as they are probed."""

    @property
    def layout(self) -> HeadLayout: ...

    def choices(self, ids: Tensor) -> Tensor:
        """What the trunk says after each row."""

    def drafts(self, ids: Tensor, depth: int, contract: dict[str, str]) -> Tensor:
        """Logits [T - depth, vocab] of drafts of a depth under a contract."""


@dataclass(frozen=True)
class Loaded:
    """A model that the engine could run."""

    trunk: Trunk
    head: MTPHead

    @property
    def layout(self) -> HeadLayout:
        return self.head.layout

    def choices(self, ids: Tensor) -> Tensor:
        normed = trunk_states(self.trunk, ids, Documents((len(ids),)), "after_final_norm")
        return self.trunk.logits(normed).argmax(-1)

    def drafts(self, ids: Tensor, depth: int, contract: dict[str, str]) -> Tensor:
        trunk, head, documents = self.trunk, self.head, Documents((len(ids),))
        kind = cast(StateKind, contract["trunk_hidden"])
        with _as(head, contract):
            states = trunk_states(trunk, ids, documents, kind)
            outputs = unroll(
                head, trunk.embed[ids], trunk.rotary, states, documents, num_depths=depth
            )
        own, last = head.module(depth).lm_head, outputs[-1][:-depth]
        return trunk.logits(last) if own is None else own(last)


@dataclass
class Stored:
    """A model that only the probe runs, without caches and from disk."""

    model: StreamedPangu
    _before: Tensor | None = None  # states of the trunk, which are the same for every contract

    @property
    def layout(self) -> HeadLayout:
        return self.model.layout

    def choices(self, ids: Tensor) -> Tensor:
        return (self._normed(ids) @ self.model.lm_head.T).argmax(-1)

    def drafts(self, ids: Tensor, depth: int, contract: dict[str, str]) -> Tensor:
        model, order = self.model, contract["fuse_order"]
        is_normed = contract["trunk_hidden"] == "after_final_norm"
        state = (self._normed(ids) if is_normed else self._states(ids))[:-depth]
        rows = len(state)
        out = state
        for index in range(depth):
            found = model.module(index, state, ids[index + 1 : index + 1 + rows], order)
            out = model.out(index, found)
            recycled = contract.get("recycled_hidden", model.layout.recycled_hidden)
            state = out if recycled == "after_out_norm" else found
        return out @ model.lm_head.T

    def _states(self, ids: Tensor) -> Tensor:
        if self._before is None:
            self._before = self.model.trunk(ids)
        return self._before

    def _normed(self, ids: Tensor) -> Tensor:
        return self.model.norm(self._states(ids), self.model.final_norm)


@contextmanager
def _as(head: MTPHead, contract: Mapping[str, Any]) -> Iterator[None]:
    """The head under another contract, for a while."""
    before = head.layout

    def give(layout: HeadLayout) -> None:
        for part in (head, *head.modules_):
            part.layout = layout

    give(replace(before, **contract))
    try:
        yield
    finally:
        give(before)


def continued(trunk: Trunk, ids: list[int], count: int, max_len: int) -> list[int]:
    """The ids and up to `count` more, each the trunk's most likely token."""
    config, device, dtype = trunk.config, trunk.embed.device, trunk.embed.dtype
    total = min(len(ids) + count, max_len)
    kept = [
        empty_states(config.recurrent, 1, dtype, device, config.more_states(kind))
        if kind.is_recurrent and config.recurrent is not None
        else empty_cache(config.kept(kind), total, dtype, device)
        for kind in config.layers
    ]
    ids, done = list(ids), 0
    while len(ids) < total:
        rows = len(ids) - done
        span = Span(0, rows, slice(done, len(ids)), slice(0, len(ids)))
        state = StateSpan(0, rows, 0 if done else None, ((rows, 0),))
        stream = trunk(
            torch.tensor(ids[done:], device=device),
            torch.arange(done, len(ids), device=device),
            [
                PagedContext(own, [span])
                if isinstance(own, LayerCache)
                else SlotRecurrence(own, [state])
                for own in kept
            ],
        )
        done = len(ids)
        ids.append(int(trunk.logits(trunk.final_norm(stream[-1:])).argmax()))
    return ids
