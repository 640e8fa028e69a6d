"""Masks of grammars on their way to the device, while the trunk of their round runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class MaskCopies:
    """Copies into the masks [requests * rows, words] of a batch, which only a choice waits for."""

    def __init__(self, masks: Tensor):
        self._masks = masks
        self._stream = torch.cuda.Stream() if masks.is_cuda else None  # beside what runs
        self._room = torch.empty(0, dtype=torch.int32)  # on the host
        self._arrived: torch.cuda.Event | None = None  # of what was copied last

    def copy(
        self, masks: Mapping[int, Sequence[np.ndarray | None]], rows: int, *, count: int
    ) -> None:
        """Of some of `count` requests, by index: words of 32 tokens for the first of their rows.

        Each request has `rows` of them. None allows all tokens. Rows without a mask keep what they
        had: no draft before them counts (`WaitingRound.cut_short`).
        """
        words = self._masks.shape[1]
        places = [index * rows + row for index, own in masks.items() for row in range(len(own))]
        host = self._space(len(places) * words).view(len(places), words)
        found = (mask for own in masks.values() for mask in own)
        for own, mask in zip(host.numpy(), found, strict=True):
            own[:] = -1 if mask is None else mask
        indices, target = torch.tensor(places), self._masks[: count * rows]
        if self._stream is None:
            target[indices] = host
            return
        with torch.cuda.stream(self._stream):
            new = host.to(self._masks.device, non_blocking=True)
            at = indices.pin_memory().to(self._masks.device, non_blocking=True)
            self._arrived = self._stream.record_event()
        torch.cuda.current_stream().wait_event(self._arrived)
        for part in (new, at):
            part.record_stream(torch.cuda.current_stream())
        target[at] = new

    def _space(self, size: int) -> Tensor:
        """So many int32, pinned for a GPU and kept: new ones would take longer to get."""
        if self._arrived is not None:
            self._arrived.synchronize()  # of a round that has ended, but for one that failed
        if self._room.numel() < size:
            more = max(size, 2 * self._room.numel())  # the next batch may be larger still
            self._room = torch.empty(more, dtype=torch.int32, pin_memory=self._stream is not None)
        return self._room[:size]
