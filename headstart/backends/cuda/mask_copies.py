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
        """Of some of `count` requests, by index: words of 32 tokens for each of their `rows` rows.

        None allows all tokens. Rows without a mask are after a draft that does not fit.
        """
        words = self._masks.shape[1]
        host = self._space(len(masks) * rows * words).view(len(masks), rows, words)
        for own, found in zip(host.numpy(), masks.values(), strict=True):
            for row, mask in enumerate(found):
                own[row] = -1 if mask is None else mask
            own[len(found) :] = -1
        indices, target = torch.tensor(list(masks)), self._masks[: count * rows]
        if self._stream is None:
            target.view(-1, rows, words)[indices] = host
            return
        with torch.cuda.stream(self._stream):
            new = host.to(self._masks.device, non_blocking=True)
            at = indices.pin_memory().to(self._masks.device, non_blocking=True)
            self._arrived = self._stream.record_event()
        torch.cuda.current_stream().wait_event(self._arrived)
        for part in (new, at):
            part.record_stream(torch.cuda.current_stream())
        target.view(-1, rows, words)[at] = new

    def _space(self, size: int) -> Tensor:
        """So many int32, pinned for a GPU and kept: new ones would take longer to get."""
        if self._arrived is not None:
            self._arrived.synchronize()  # of a round that has ended, but for one that failed
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)
        return self._room[:size]
