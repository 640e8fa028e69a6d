"""Masks of grammars on their way to the device, while the trunk of their round runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headstart.backends.rounds import RoundMasks


class MaskCopies:
    """Copies into the masks [requests * rows, words] of a batch, which only a choice waits for."""

    def __init__(self, masks: Tensor):
        self._masks = masks
        self._stream = torch.cuda.Stream() if masks.is_cuda else None  # beside what runs
        self._room = torch.empty(0, dtype=torch.int32)  # on the host
        self._arrived: torch.cuda.Event | None = None  # of what was copied last

    def room(self, rows: int, words: int) -> np.ndarray:
        """Memory for so many masks, pinned for a GPU and kept: new one would take longer to get."""
        if self._arrived is not None:
            self._arrived.synchronize()  # of a round that has ended, but for one that failed
        size = rows * words
        if self._room.numel() < size:
            more = max(size, 2 * self._room.numel())  # the next batch may be larger still
            self._room = torch.empty(more, dtype=torch.int32, pin_memory=self._stream is not None)
        return self._room[:size].view(rows, words).numpy()

    def copy(self, masks: RoundMasks, rows: int, *, count: int) -> None:
        """What was written to `room`, for some of `count` requests that have `rows` rows each.

        Rows without a mask keep what they had: no draft before them counts
        (`WaitingRound.cut_short`).
        """
        size = masks.words.shape
        host = self._room[: size[0] * size[1]].view(size)
        pairs = zip(masks.requests, masks.depths, strict=True)
        places = torch.tensor([index * rows + depth for index, depth in pairs])
        target = self._masks[: count * rows]
        if self._stream is None:
            _put(target, places, host)
            return
        with torch.cuda.stream(self._stream):
            new = host.to(self._masks.device, non_blocking=True)
            at = places.pin_memory().to(self._masks.device, non_blocking=True)
            self._arrived = self._stream.record_event()
        torch.cuda.current_stream().wait_event(self._arrived)
        for part in (new, at):
            part.record_stream(torch.cuda.current_stream())
        _put(target, at, new)


def _put(target: Tensor, at: Tensor, masks: Tensor) -> None:
    """Rows of masks that may have fewer words: tokens behind those are not allowed."""
    words = masks.shape[1]
    target[:, :words][at] = masks
    if words < target.shape[1]:
        target[:, words:][at] = 0
